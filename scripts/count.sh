# shellcheck shell=bash
# Counting and judging what a lane printed. Sourced by scripts/test; tried by crates/test/testkit/tests/counting.rs.
# The caller provides the array `trouble`, and stands in the top directory.

# count LOG: sets tests_passed, tests_failed, tests_skipped from libtest's summaries and from skip lines. A skipped
# test returns early and libtest calls it passed: it is moved from one column to the other.
count() {
	local said ignored
	tests_passed=$(awk '/^test result:/ { n += $4 } END { print n + 0 }' "$1")
	tests_failed=$(awk '/^test result:/ { n += $6 } END { print n + 0 }' "$1")
	ignored=$(awk '/^test result:/ { n += $8 } END { print n + 0 }' "$1")
	said=$(grep -c '^skipped: ' "$1")
	tests_skipped=$((said + ignored))
	tests_passed=$((tests_passed - said))
}

# Checks the reasons of a log against the list.
judge_skips() {
	local line reason
	while read -r line; do
		reason=${line#skipped: }
		reason=${reason%% \[*}
		is_allowed "$reason" || trouble+=("not allowed to be skipped: $reason (in $2); see tests/skips.allowed")
	done < <(grep '^skipped: ' "$1")
	while read -r line; do
		is_allowed "ignored: $line" || trouble+=("ignored test: $line (in $2); see tests/skips.allowed")
	done < <(sed -n 's/^test \(.*\) \.\.\. ignored.*/\1/p' "$1")
}

is_allowed() {
	local pattern
	while read -r pattern; do
		[[ $1 =~ ^($pattern)$ ]] && return 0
	done < <(grep -v '^#' tests/skips.allowed | sed -n 's/  .*//p')
	return 1
}

# late LOG: tests and stories that had begun and were not over, with their bounds where they have some.
late() {
	awk '
		/ has been running for over / { began[$2] = 1 }
		/^test .* \.\.\. (ok|FAILED|ignored)/ { delete began[$2] }
		/^xen [^ ]*: / { story[$2] = $0; sub(/.*took [^;]*; /, "", story[$2]) }
		END {
			for (name in began) printf "; %s was not over", name
			for (name in story) if (story[name] !~ /^end begins/) printf "; %s %s", name, story[name]
		}' "$1"
}

# causes LOG: each test that failed, and how its panic began: what a reader of the run's last lines needs first.
causes() {
	awk '
		/^failures:$/ { failed = 1; next }
		/^test result:/ { failed = 0; rest = 0 }
		failed && /^---- .* stdout ----$/ { name = $2; rest = 0; next }
		failed && name != "" && / panicked at / { print name ":"; name = ""; rest = 20 }
		/^note: run with|^note: Some details|^stack backtrace:/ { rest = 0 }
		rest > 0 { rest--; if ($0 != "") print "  " substr($0, 1, 600) }' "$1"
}
