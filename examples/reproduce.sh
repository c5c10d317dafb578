#!/bin/sh
# Some experiments of two papers, what they found beside what is found here: no GPU and no server is needed.
set -eu
kvloom=${KVLOOM:-kvloom}

$kvloom reproduce microserving --figure 12 --figure table-3
$kvloom reproduce muxserve --figure 3
