#!/usr/bin/env bash
# A server and three hospitals, as on four machines: each process in its own folder, where nothing but its own table is.
# Arguments are added to each command that trains, such as --trainer.max_epochs 5.
set -euo pipefail
cd "$(dirname "$0")"
here=$PWD minutes=${MINUTES:-10} port=${PORT:-8443}
sites=(cleveland hungary long_beach)

stop() {
  local job
  for job in $(jobs -pr); do kill "$job" 2>/dev/null || true; done
  wait
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

start() {  # FOLDER LOG WORDS...: the command of fedlit in a folder, in the background, for MINUTES at most
  local folder=$1 log=$2
  shift 2
  (cd "$folder" && exec timeout --kill-after 30 "${minutes}m" fedlit "$@") >"$log" 2>&1 &
}

train() {  # EXPERIMENT WORDS...
  local name=$1 site each failed=0
  shift
  start server "server/$name.log" serve --config "$here/$name.yaml" --config "$here/server.yaml" \
    --seat.address "127.0.0.1:$port" "$@"
  for site in "${sites[@]}"; do
    start "sites/$site" "sites/$site/$name.log" join --config "$here/$name.yaml" --config "$here/$site.yaml" \
      --seat.server "localhost:$port" "$@"
  done
  for each in server "${sites[@]}"; do
    wait -n || { failed=1 && break; }  # the others would wait for it
  done
  stop
  if ((failed)); then
    tail -n 5 "server/$name.log" sites/*/"$name.log" >&2
    exit 1
  fi
}

finish() {  # EXPERIMENT METHOD: predictions and a model at Long Beach, from its own checkpoint
  local run checkpoint
  cd sites/long_beach
  run=$(ls -td "runs/$2"/version_* | head -n 1)
  checkpoint=$(ls -t "$run"/checkpoints/*.ckpt* | head -n 1)
  fedlit predict --config "$here/$1.yaml" --config "$here/long_beach.yaml" --ckpt_path "$checkpoint" \
    --data.init_args.predict_file patients.csv \
    --trainer.callbacks+=TargetPredictions --trainer.callbacks.csv="$1.csv" >"predict_$1.log" 2>&1
  fedlit export "$run" --config "$here/$1.yaml" --config "$here/long_beach.yaml" --ckpt_path "$checkpoint" \
    --output "$1.pt2" >"export_$1.log" 2>&1
  cd "$here"
  echo "$1: sites/long_beach/$1.csv and $1.pt2"
}

mkdir -p server
[[ -d sites ]] || python make_sites.py
[[ -d certificates ]] || fedlit certificates --sites cleveland,hungary,long_beach --server localhost --out certificates
train experiment "$@"
finish experiment FedGP
train dadil "$@"
finish dadil FedDaDiL
