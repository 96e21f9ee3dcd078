# How the demonstrations speak, wait and look at processes. Sourced by scripts/run, run-disk and run-pool, which set $bin.
# shellcheck shell=bash disable=SC2154,SC2034

if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then
	bold=$'\e[1m' dim=$'\e[2m' green=$'\e[32m' red=$'\e[31m' plain=$'\e[0m'
else
	bold='' dim='' green='' red='' plain=''
fi
step() { printf '\n%s%s%s\n' "$bold" "$*" "$plain"; }
note() { printf '  %s\n' "$*"; }
good() { printf '  %sok%s  %s\n' "$green" "$plain" "$*"; }
die() {
	printf '\n%sfailed%s  %s\n' "$red" "$plain" "$*" >&2
	exit 1
}
# Shows a command as one would type it, runs it, and indents what it says.
shown() {
	printf '  %s$ tapio %s%s\n' "$dim" "$*" "$plain"
	"$bin/tapio" "$@" | sed 's/^/    /;$a\' || die "'tapio $*' failed"
}
now() { echo "${EPOCHREALTIME/,/.}"; }
since_ms() { awk -v a="$1" -v b="$(now)" 'BEGIN { printf "%.1f", (b - a) * 1000 }'; }

# Not `kill -0`: a process that has ended stays visible if its parent does not collect it.
alive() { [ -e "/proc/$1/stat" ] && ! grep -q ') Z ' "/proc/$1/stat" 2>/dev/null; }

# wait_until SECONDS WHAT COMMAND...
wait_until() {
	local deadline=$((SECONDS + $1)) what=$2
	shift 2
	until "$@"; do
		[ "$SECONDS" -lt "$deadline" ] || die "no $what within the time allowed"
		sleep 0.02
	done
}
