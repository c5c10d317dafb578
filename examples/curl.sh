#!/bin/sh
# The API by hand. Every answer is greedy, so it is the same each time.
set -eu
URL="${KVLOOM_URL:-http://127.0.0.1:8000}"

curl --silent --show-error --output /dev/null "$URL/v1/models" || {
  echo "no server answers at $URL; \`kvloom serve\` starts one" >&2
  exit 1
}

# what the server says, without what differs from run to run
ask() {
  curl --silent --show-error "$@" | sed -E 's/"(chatcmpl|cmpl)-[0-9a-f]+"/"\1-…"/g; s/"created":[0-9]+/"created":0/g; s/"cached_tokens":[0-9]+/"cached_tokens":0/g'
  echo
}

echo "# models"
ask "$URL/v1/models"

echo "# chat"
ask "$URL/v1/chat/completions" -d '{"model": "sums", "temperature": 0,
  "messages": [{"role": "user", "content": "What is 17 + 25?"}]}'

echo "# chat as a stream, its pieces put together"
ask --no-buffer "$URL/v1/chat/completions" -d '{"model": "sums", "temperature": 0, "stream": true,
  "messages": [{"role": "user", "content": "0 + 7"}]}' | sed -En 's/.*"content":"([^"]+)".*/\1/p' | tr -d '\n'
echo

echo "# completion of two prompts, up to a stop string"
ask "$URL/v1/completions" -d '{"model": "stories", "temperature": 0, "max_tokens": 40, "stop": ".",
  "prompt": ["Once upon a time, there was a fox", "Once upon a time, there was an owl"]}'

echo "# a model that is not served"
ask "$URL/v1/chat/completions" -d '{"model": "sum", "messages": [{"role": "user", "content": "hi"}]}'

echo "# a parameter that cannot be"
ask "$URL/v1/chat/completions" -d '{"model": "sums", "temperature": 7,
  "messages": [{"role": "user", "content": "hi"}]}'
