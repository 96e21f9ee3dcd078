# The client libraries that users of XenServer have, as files below target/lanes that nothing installs. Sourced by
# scripts/setup. Each is pinned to a version and checked by a sum; one that cannot be fetched says so, and its tests say
# 'skipped'.
# shellcheck shell=bash disable=SC2154

# --- Python's XenAPI: the library that XenServer's scripts and products use ---

xenapi='XenAPI==26.21.1 --hash=sha256:928493733148795c3735df27e5b446c5331fc21c1f84a1a6797a502ecae96d99'

fetch_xenapi() {
	local dir=$target/lanes/python work
	if [ -e "$dir/XenAPI.whl" ]; then say "XenAPI: ${xenapi%% *}"; return; fi
	command -v pip3 >/dev/null || { say "there is no pip3; tests with XenServer's client library will say 'skipped'"; return; }
	say "fetching ${xenapi%% *} below $target/lanes (not installed): XenServer's client library"
	work=$(mktemp -d)
	echo "$xenapi" >"$work/requirements"
	if pip3 download -q --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
		-d "$work" -r "$work/requirements" >"$work/log" 2>&1; then
		mkdir -p "$dir"
		cp "$work"/*.whl "$dir/XenAPI.whl"
	else
		tail -n 3 "$work/log" >&2
		say "it could not be fetched; tests with it will say 'skipped'"
	fi
	rm -rf "$work"
}

# --- npm's xen-api: the library of Xen Orchestra. Versions and sums of all its parts are in package-lock.json ---

clients=crates/test/e2e/tests/clients

fetch_javascript() {
	local dir=$target/lanes/javascript work
	if cmp -s "$clients/javascript/package-lock.json" "$dir/package-lock.json"; then
		say "npm xen-api: $(sed -n 's/.*"xen-api": "\(.*\)".*/\1/p' "$dir/package.json")"
		return
	fi
	command -v npm >/dev/null || { say "there is no npm; tests with the client library of Xen Orchestra will say 'skipped'"; return; }
	say "fetching the npm package xen-api below $target/lanes (not installed): the client library of Xen Orchestra"
	work=$(mktemp -d)
	cp "$clients"/javascript/package*.json "$work"
	# No script of a package runs, here or later.
	if (cd "$work" && npm ci --ignore-scripts --omit=dev --no-audit --no-fund --loglevel=error) >"$work/log" 2>&1; then
		rm -rf "$dir"
		mkdir -p "$dir"
		# The lock file comes last: it says that the rest is there.
		cp -r "$work/node_modules" "$work/package.json" "$dir"
		cp "$work/package-lock.json" "$dir"
	else
		tail -n 3 "$work/log" >&2
		say "it could not be fetched; tests with it will say 'skipped'"
	fi
	rm -rf "$work"
}

# --- Ansible's modules for XenServer: a few files of Debian's package of all of its collections ---

fetch_ansible() {
	local dir=$target/lanes/ansible work inside=./usr/lib/python3/dist-packages/ansible_collections
	if [ -e "$dir/version" ]; then say "Ansible's modules: $(cat "$dir/version")"; return; fi
	[ -n "$(candidate ansible)" ] || update_lists
	[ -n "$(candidate ansible)" ] || { say "no package 'ansible' found; tests with its modules will say 'skipped'"; return; }
	say "unpacking the modules for XenServer of the package ansible below $target/lanes (not installed)"
	work=$(mktemp -d)
	# The list may be older than the archive: then the file is gone and the list has to be fetched again.
	if (cd "$work" && { apt-get download -qq ansible 2>/dev/null || { update_lists && apt-get download -qq ansible; }; }) &&
		dpkg-deb --fsys-tarfile "$work"/ansible_*.deb | tar -xf - -C "$work" --wildcards \
			"$inside/community/general/*xenserver*" "$inside/community/general/meta/*" \
			"$inside/community/general/MANIFEST.json"; then
		rm -rf "$dir"
		mkdir -p "$dir"
		cp -r "$work/$inside" "$dir"
		candidate ansible >"$dir/version"
	else
		say "it could not be fetched; tests with it will say 'skipped'"
	fi
	rm -rf "$work"
}

# --- Go's client library: pinned by go.mod and go.sum, built into a program ---

fetch_go() {
	local dir=$target/lanes/go log
	if [ -x "$dir/client" ]; then say "Go's client library: $(sed -n 's/^require //p' "$clients/go/go.mod")"; return; fi
	command -v go >/dev/null || { say "there is no Go; tests with its client library will say 'skipped'"; return; }
	mkdir -p "$dir"
	log=$(realpath "$dir")
	if (cd "$clients/go" && go build -mod=readonly -o "$log/client" .) >"$log/log" 2>&1; then
		say "Go's client library: $(sed -n 's/^require //p' "$clients/go/go.mod")"
	else
		say "Go's client library could not be fetched ($(tail -n 1 "$log/log")); tests with it will say 'skipped'"
	fi
}

# --- cloud-init: the reader of settings that cloud images have. Installed, it would run at every boot of this host ---

fetch_cloud_init() {
	local dir=$target/lanes/cloud-init work inside=./usr/lib/python3/dist-packages
	if [ -e "$dir/version" ]; then say "cloud-init: $(cat "$dir/version")"; return; fi
	[ -n "$(candidate cloud-init)" ] || update_lists
	[ -n "$(candidate cloud-init)" ] || { say "no package 'cloud-init' found; tests with its reader will say 'skipped'"; return; }
	say "unpacking the reader of the package cloud-init below $target/lanes (not installed)"
	work=$(mktemp -d)
	# The list may be older than the archive: then the file is gone and the list has to be fetched again.
	if (cd "$work" && { apt-get download -qq cloud-init 2>/dev/null || { update_lists && apt-get download -qq cloud-init; }; }) &&
		dpkg-deb --fsys-tarfile "$work"/cloud-init_*.deb | tar -xf - -C "$work" --wildcards "$inside/cloudinit/*"; then
		rm -rf "$dir"
		mkdir -p "$dir"
		cp -r "$work/$inside/cloudinit" "$dir"
		candidate cloud-init >"$dir/version"
	else
		say "it could not be fetched; tests with it will say 'skipped'"
	fi
	rm -rf "$work"
}

fetch_clients() { fetch_xenapi && fetch_javascript && fetch_ansible && fetch_go && fetch_cloud_init; }
