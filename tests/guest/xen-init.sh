#!/bin/sh
# First program of a Debian dom0 under a real Xen: an initramfs with busybox, the stock toolstack, our programs.
# `xtest` on the kernel's command line names stories of stories.sh, joined by '+'; results go to the console.
/bin/busybox mkdir -p /proc /sys /dev /mnt /bin /tmp /run /etc /var/lib/xenstored /var/lib/xen /var/lock /var/log/xen/console
/bin/busybox --install -s /bin
export PATH=/usr/lib/xen-4.17/bin:/sbin:/usr/bin:/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/pts
mount -t devpts devpts /dev/pts
for dir in /mnt /tmp /run /dev/shm; do mount -t tmpfs tmpfs "$dir"; done
mkdir -p /run/xen /run/xenstored /run/lock
ln -s /run /var/run
echo dom0 >/proc/sys/kernel/hostname
: >/etc/mtab
mkdir -p /etc/xen
: >/etc/xen/xl.conf
. /lib.sh
# The hypervisor's drivers come first.
for module in xen-privcmd xenfs xen-evtchn xen-gntdev xen-gntalloc crc16 crc32c_generic mbcache jbd2 ext4 loop; do
	[ ! -e "/$module.ko" ] || insmod "/$module.ko" || fail "the kernel refused $module.ko"
done
mount -t xenfs xenfs /proc/xen || fail "no xenfs"

# --- time ---

# The seconds in these scripts are those of an idle host, whose dom0 has its toolstack after
# $quiet_boot seconds. On one that is slower or busier they count as many times as this boot took longer.
quiet_boot=6
pace=4

# patient SECONDS COMMAND...: the command, ended after so many seconds of an idle host.
patient() {
	local limit=$(($1 * pace))
	shift
	timeout $limit "$@"
}

# wait_for SECONDS WHAT COMMAND...: until the command succeeds.
wait_for() {
	local deadline what=$2
	deadline=$(($(cut -d. -f1 /proc/uptime) + $1 * pace))
	shift 2
	until "$@" >/dev/null 2>&1; do
		[ "$(cut -d. -f1 /proc/uptime)" -lt "$deadline" ] || fail "waited in vain for $what"
		usleep 50000
	done
}

# --- the toolstack ---

# The stock one, or ours in its place.
start_xenstored() {
	case $tapio_xenstored in
	ours)
		tapio-xenstored --pid-file /run/xen/xenstored.pid >/tmp/xenstored.log 2>&1 &
		wait_for 20 "our xenstored to serve" test -S /run/xenstored/socket
		report "xenstored=$(readlink /proc/$!/exe)"
		;;
	*) must xenstored --pid-file /run/xen/xenstored.pid ;;
	esac
}

# The process that watches xenstore for disks.
start_tapback() {
	tapio-tapback >/tmp/tapback.log 2>&1 &
	tapback=$!
}

start_toolstack() {
	start_xenstored
	must patient 30 xen-init-dom0
	must xenconsoled --log=all --log-dir=/var/log/xen/console --pid-file=/run/xen/xenconsoled.pid
	report "xen=$(cat /sys/hypervisor/version/major).$(cat /sys/hypervisor/version/minor)$(cat /sys/hypervisor/version/extra)"
}

# --- guests ---

# guest_config NAME [PARAMETER...]: parameters go to the guest's kernel.
guest_config() {
	local name=$1
	shift
	cat >"/tmp/$name.cfg" <<-END
	name = "$name"
	type = "pv"
	kernel = "/boot/vmlinux"
	ramdisk = "/boot/guest.cpio"
	extra = "console=hvc0 quiet loglevel=1 panic=-1 $*"
	memory = ${memory:-192}
	vcpus = ${vcpus:-1}
	on_poweroff = "destroy"
	on_reboot = "destroy"
	on_crash = "destroy"
	END
}

# Where xenconsoled keeps what NAME said: after the domain's name, or after log_NAME.
console_log() {
	eval "echo /var/log/xen/console/\${log_$1:-guest-$1.log}"
}

# domid NAME
domid() { eval "echo \$domid_$1"; }

# create NAME [PARAMETER...]: a paused guest.
create() {
	guest_config "$@"
	# The console of one of the same name that is gone.
	rm -f "$(console_log "$1")"
	must patient 60 xl create -p "/tmp/$1.cfg"
	eval "domid_$1=$(xl domid "$1")"
}

# run NAME: lets it run and waits for its agent, which listens on the terminal tty_NAME.
run() {
	must patient 30 xl unpause "$1"
	wait_for 60 "$1 to boot" grep -q '^AGENT ready' "$(console_log "$1")"
	terminal "$1"
}

# resume NAME: lets one that was restored run.
resume() {
	must patient 30 xl unpause "$1"
	terminal "$1"
}

terminal() { eval "tty_$1=$(xenstore-read "/local/domain/$(domid "$1")/console/tty")"; }

# guest NAME [PARAMETER...]: one without disks that runs.
guest() {
	create "$@"
	run "$1"
}

asked=0
# tell NAME COMMAND...: the guest's shell runs it. Does not wait; `answer NAME` does.
tell() {
	local name=$1 tty
	shift
	asked=$((asked + 1))
	eval "tty=\$tty_$name"
	echo "$asked $*" >"$tty"
}

# answered NAME N
answered() { grep -q "^END $2 " "$(console_log "$1")"; }

# answer NAME [N]: what it said to question N (the last), and its exit status.
answer() {
	local n=${2:-$asked} log
	log=$(console_log "$1")
	wait_for "${patience:-60}" "$1's answer to question $n" answered "$1" "$n"
	sed -n "/^BEGIN $n\r*\$/,/^END $n /p" "$log" | sed '1d;$d' | tr -d '\r'
	return "$(sed -n "s/^END $n \([0-9]*\).*/\1/p" "$log")"
}

# ask NAME COMMAND...: runs it; what it said is in $said afterwards.
ask() {
	tell "$@"
	said=$(answer "$1")
}

# in_guest NAME COMMAND...: as ask, and it must succeed.
in_guest() { ask "$@" || fail "in guest $1: '$*' ended with $?: $said"; }

. /disks.sh
. /toolstack.sh
. /stories.sh
# What our programs and the guests said, when something goes wrong.
why() { tail -n 30 /tmp/*.log /tmp/disk-*.log /var/log/xen/console/guest-*.log 2>/dev/null; }

start_toolstack
begin=$(seconds)
pace=$(awk -v boot="$begin" -v quiet=$quiet_boot 'BEGIN { p = boot / quiet; if (p < 1) p = 1; print int(p + 0.999) }')
report "boot=$begin"
report "pace=$pace"
[ ! -e /sbin/tapio-tapback ] || start_tapback
for story in $(echo "$xtest" | tr + ' '); do
	type "case_$story" >/dev/null 2>&1 || fail "unknown story '$story'"
	report "begun=$story"
	"case_$story"
	now=$(seconds)
	report "$story.seconds=$(echo "$now $begin" | awk '{ print $1 - $2 }')"
	begin=$now
done
report begun=end
report status=ok
halt_guest
