# shellcheck shell=bash
# Sourced by scripts/setup. Xen and the kernel of its lane: taken from the distribution's packages, unpacked below
# target/lanes/xen, never installed.
#
#   xen       the hypervisor, as QEMU's multiboot loader wants it
#   vmlinux   the kernel of dom0 and of the guests, unpacked here once instead of at every boot under emulation
#   *.ko      drivers of dom0 and of the guests
#   root/     the toolstack's programs and libraries

# Drivers of dom0 (for its hypercalls, file systems for images) and of guests (the front end of a disk).
xen_drivers='xen-privcmd xenfs xen-evtchn xen-gntdev xen-gntalloc xen-blkfront xen-blkback loop brd crc16 crc32c_generic mbcache jbd2 ext4'

fetch_xen() {
	local dir=$target/lanes/xen work kernel
	if [ -e "$dir/version" ]; then say "Xen: $(cat "$dir/version")"; return; fi
	[ "$(dpkg --print-architecture)" = amd64 ] || { say "no Xen for this architecture; the xen lane will say 'skipped'"; return; }
	[ -n "$(candidate xen-utils-4.17)" ] || update_lists
	# The metapackage names the real one.
	kernel=$(apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/^ *Depends: \(linux-image-6[^ ]*\)$/\1/p' | head -n 1)
	if [ -z "$(candidate xen-utils-4.17)" ] || [ -z "$kernel" ]; then
		say "this distribution has no Xen 4.17, or no kernel package for it; the xen lane will say 'skipped'"
		return
	fi
	say "unpacking Xen 4.17 and $kernel below $dir (not installed): the hypervisor of the xen lane"
	work=$(mktemp -d)
	if ! (cd "$work" && xen_packages "$kernel" && xen_unpack); then
		rm -rf "$work"
		die "could not fetch or unpack Xen: check the network"
	fi
	mkdir -p "$target/lanes"
	rm -rf "$dir"
	mv "$work/lane" "$dir"
	rm -rf "$work"
	# Last, because it tells the next run that all is there.
	echo "4.17 ($(candidate xen-hypervisor-4.17-amd64)), $kernel" >"$dir/version"
}

# xen_packages KERNEL: fetches the packages into the working directory.
xen_packages() {
	local packages
	packages=$(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
		--no-enhances xen-utils-4.17 | grep -E '^lib(xen|yajl)[^ ]*$' | sort -u)
	# shellcheck disable=SC2086 # a list of names
	set -- "$1" xen-hypervisor-4.17-amd64 xen-utils-4.17 xenstore-utils $packages
	# The list may be older than the archive: then the file is gone and the list has to be fetched again.
	apt-get download -qq "$@" 2>/dev/null || { update_lists && apt-get download -qq "$@"; }
}

# xen_unpack: makes ./lane of the packages in the working directory.
xen_unpack() {
	local package driver found
	mkdir -p lane/root
	for package in *.deb; do
		case $package in
		linux-image-*)
			dpkg-deb --fsys-tarfile "$package" | tar -x --wildcards './boot/vmlinuz-*' './lib/modules/*/kernel/*' || return
			;;
		*) dpkg -x "$package" lane/root || return ;;
		esac
	done
	gzip -dc lane/root/boot/xen-4.17-amd64.gz >lane/xen || return
	xen_kernel boot/vmlinuz-* lane/vmlinux || return
	for driver in $xen_drivers; do
		# One that is not found is built in; where that is not so, the guest that needs it says what it lacks.
		found=$(find lib/modules \( -name "$driver.ko" -o -name "$driver.ko.xz" \) | head -n 1)
		case $found in
		*.xz) xz -dc "$found" >"lane/$driver.ko" || return ;;
		*.ko) cp "$found" "lane/$driver.ko" || return ;;
		esac
	done
	rm -rf lane/root/boot lane/root/usr/share lane/root/usr/lib/debug
}

# xen_kernel VMLINUZ TO: the ELF file inside a bzImage. Its header (Linux, Documentation/x86/boot.rst) says where the
# compressed payload begins, after the real-mode part, and how long it is.
xen_kernel() {
	local sectors offset length magic
	sectors=$(od -An -t u1 -j 497 -N 1 "$1")
	offset=$(od -An -t u4 -j 584 -N 4 "$1")
	length=$(od -An -t u4 -j 588 -N 4 "$1")
	tail -c +$(((sectors + 1) * 512 + offset + 1)) "$1" | head -c $((length)) >payload
	magic=$(od -An -t x1 -N 4 payload | tr -d ' ')
	case $magic in
	# Behind the stream stands its unpacked length, 4 bytes.
	fd377a58) xz -dc --single-stream <payload >"$2" ;;
	28b52ffd) head -c -4 payload | zstd -qdc >"$2" ;;
	1f8b*) gzip -qdc <payload >"$2" || [ $? = 2 ] ;;
	*) echo "the kernel is compressed in a way that is not known here ($magic)" >&2; return 1 ;;
	esac
	[ "$(head -c 4 "$2" | tail -c 3)" = ELF ]
}
