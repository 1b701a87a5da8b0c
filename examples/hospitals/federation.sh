#!/usr/bin/env bash
# Four processes, as on four machines: each in its hospital's folder, where nothing but that hospital's table is.
# Arguments are added to each command, such as --trainer.max_epochs 5.
set -euo pipefail
cd "${SITES:-sites}"
export MASTER_ADDR=127.0.0.1 MASTER_PORT=${MASTER_PORT:-29501} LOCAL_RANK=0
rank=0
for site in cleveland hungary switzerland long_beach; do
  (cd "$site" && NODE_RANK=$rank exec fedlit fit --config ../../hospitals.yaml --trainer.num_nodes 4 "$@") \
    >"$site/fit.log" 2>&1 &
  rank=$((rank + 1))
done
failed=0
for job in $(jobs -p); do wait "$job" || failed=1; done
exit $failed
