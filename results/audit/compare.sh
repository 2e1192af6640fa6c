#!/bin/sh
# Train with five defences on the embedded digits, audit each, and put the audits side by side.
set -e
out=${1:-build/compare}
here=$(dirname "$0")
train() { name=$1; shift; dbcl train --out "$out/$name" --seed 0 "$@"; dbcl audit "$out/$name" --quick; }
train no-defence --preset plain
train paper --preset paper
train blind --preset blind
train dropout --preset paper --sketch sampling-v1
train noise --preset plain --update-clip 1 --update-noise 0.01
dbcl compare "$out/no-defence" "$out/paper" "$out/blind" "$out/dropout" "$out/noise" --out "$here/compare.html"
