#!/usr/bin/env bash
# Checks of a device that do not measure time, beside each other, for a device that is there for minutes:
#
#     bash tests/device/together.sh DIRECTORY [SECONDS]
#
# Writes a log of each to the directory, and prints what failed. Benchmarks need the device for
# themselves: run check_device.py for them.
set -u
out=$1
seconds=${2:-200}
export PYTHONPATH="src:.:${PYTHONPATH:-}"
python3 -m lowtide.compiled >/dev/null || exit 1
checks="timeout $seconds python3 tests/device/check_device.py"
$checks --recorders compiled --minutes 0 >"$out/checks.log" 2>&1 &
$checks --recorders python --minutes 0 --only "idle steps" "unwatched" "steps of other" FSDP2 \
    >"$out/python.log" 2>&1 &
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True $checks --recorders compiled --minutes 2 \
    --only allocator >"$out/expandable.log" 2>&1 &
for part in 0 1 2 3 4 5; do
    timeout "$seconds" python3 tests/device/families.py --part $part/6 --seconds $((seconds - 40)) \
        >"$out/families-$part.log" 2>&1 &
done
wait
cat "$out"/families-*.log >"$out/families.log"
rm "$out"/families-?.log
grep -h "^FAILED\|^failed\|^different\|^over \|passed,\|^[0-9]* " "$out"/*.log | cut -c1-300
