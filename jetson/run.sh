#!/bin/bash
# Runs a command at full clocks and says what the machine was set to: jetson/run.sh [-m MODE] COMMAND...; without a command it
# only sets and tells the power mode. MODE is a name or a number of nvpmodel (default: the MAXN mode); it stays after that, the
# clocks go back to what they were. On other machines it says what is missing and runs the command all the same.
set -uo pipefail
conf=${NVPMODEL_CONF:-/etc/nvpmodel.conf}
mode=
while getopts m: option; do
  [[ $option == m ]] && mode=$OPTARG || exit 2
done
shift $((OPTIND - 1))

say() { echo "jetson/run.sh: $*" >&2; }
as_root() { if ((EUID)); then sudo "$@"; else "$@"; fi; }

# The number of a mode that nvpmodel's configuration names; without a name, of the first whose name begins with MAXN.
number_of() {
  sed -nE 's/^< *POWER_MODEL +ID=([0-9]+) +NAME=([^ >]+) *>.*/\1 \2/p' "$conf" 2>/dev/null |
    awk -v name="$1" 'name ? $2 == name : $2 ~ /^MAXN/ { print $1; exit }'
}

if command -v nvpmodel >/dev/null; then
  number=$mode
  [[ $mode =~ ^[0-9]+$ ]] || number=$(number_of "$mode")
  if [[ ! $number ]]; then
    say "$conf has no power mode ${mode:-that begins with MAXN}"
    exit 2
  fi
  # Some changes need a reboot, for which nvpmodel asks; it is not done here.
  as_root nvpmodel -m "$number" </dev/null >&2 || say "the power mode could not be set; it may need a reboot: sudo nvpmodel -m $number"
  nvpmodel -q >&2 || say "nvpmodel -q does not tell the power mode"
else
  say "there is no nvpmodel: not a Jetson, or its nvidia-l4t-nvpmodel package is missing; power mode untouched"
fi

saved=
if command -v jetson_clocks >/dev/null; then
  if (($#)); then
    saved=$(mktemp -u)
    as_root jetson_clocks --store "$saved" >&2 || saved=
    as_root jetson_clocks >&2 || say "jetson_clocks failed: clocks go up and down with the load"
  fi
  as_root jetson_clocks --show >&2 || say "jetson_clocks does not tell the clocks"
else
  governors=$(cat /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor 2>/dev/null | sort -u | tr '\n' ' ')
  say "there is no jetson_clocks; CPU governors: ${governors:-none are shown}"
fi
(($#)) || exit 0

"$@"
status=$?
if [[ $saved ]]; then
  as_root jetson_clocks --restore "$saved" >&2 || say "the clocks stay as they are until the next start"
  as_root rm -f "$saved"
fi
exit $status
