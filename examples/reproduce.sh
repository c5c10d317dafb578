#!/bin/sh
# Two of a paper's experiments, what it found beside what is found here: no GPU and no server is needed.
set -eu
kvloom=${KVLOOM:-kvloom}

$kvloom reproduce microserving --figure 12 --figure table-3
