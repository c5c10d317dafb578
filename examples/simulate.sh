#!/bin/sh
# Plan a cluster that is not here, and see what it would do: no GPU and no server is needed.
set -eu
here=$(dirname "$0")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
kvloom=${KVLOOM:-kvloom}

$kvloom plan "$here/cluster.yaml" -o "$work/plan.json"
$kvloom simulate "$work/plan.json" --workload "$here/traffic.yaml" --slo-scale 5

# the same with a mesh for each model
$kvloom plan "$here/cluster.yaml" --baseline spatial -o "$work/spatial.json"
$kvloom simulate "$work/spatial.json" --workload "$here/traffic.yaml" --slo-scale 5
