# shellcheck shell=dash
# SRs on iSCSI and on host bus adapters, by the toolstack's daemon and `xe`. Target and initiator are in the same
# User-mode Linux guest: this kernel has both. Sourced by uml-init.sh after uml-shares.sh, whose helpers it uses.

config=/sys/kernel/config/target
iqn=iqn.2026-01.org.example:disks
chap_password=geheim-4711
mutual_password=zurueck-4711
tpg=$config/iscsi/$iqn/tpgt_1

# lun NUMBER SECTOR MIB: a LUN of the target with sectors of so many bytes, on a loop device over a file of the disk; with
# `file` instead of a number of bytes on the file, so that nothing but the LUN shows LVM what is on it.
lun() {
	truncate -s "$3M" "$dir/lun$1" || fail "no file for LUN $1"
	if [ "$2" = file ]; then
		store=$config/core/fileio_$1/disk$1
		backing="fd_dev_name=$dir/lun$1,fd_dev_size=$(($3 << 20))"
	else
		loop=$(losetup -f --show -b "$2" "$dir/lun$1") || fail "no loop device for LUN $1"
		store=$config/core/iblock_$1/disk$1
		backing="udev_path=$loop"
	fi
	mkdir -p "$store"
	echo "$backing" >"$store/control" || fail "LUN $1 has no device"
	echo 1 >"$store/enable" || fail "LUN $1 cannot be switched on"
	echo "tapio-serial-$1" >"$store/wwn/vpd_unit_serial"
	mkdir -p "$tpg/lun/lun_$1"
	ln -s "$store" "$tpg/lun/lun_$1/disk" || fail "LUN $1 is not offered"
}

# Names and passwords of both sides: `host` logs in, `array` answers. A line end would be a part of them.
target_here() {
	mkdir -p "$tpg" "$tpg/np/127.0.0.1:3260" "$tpg/np/127.0.0.2:3260"
	for setting in generate_node_acls=1 cache_dynamic_acls=1 demo_mode_write_protect=0 authentication=1; do
		echo "${setting#*=}" >"$tpg/attrib/${setting%=*}" || fail "the target takes no $setting"
	done
	printf %s host >"$tpg/auth/userid"
	printf %s $chap_password >"$tpg/auth/password"
	printf %s array >"$tpg/auth/userid_mutual"
	printf %s $mutual_password >"$tpg/auth/password_mutual"
	for number in 0 1 2; do
		case $number in
		0) lun 0 512 48 ;;
		1) lun 1 4096 64 ;;
		2) lun 2 file 160 ;;
		esac
	done
	echo 1 >"$tpg/enable" || fail "the target cannot be switched on"
}

iscsi_here() {
	mkdir -p /mnt/bin /mnt/iscsi
	cp /etc/iscsi/iscsid.conf /mnt/iscsi/ || fail "open-iscsi is not installed"
	echo InitiatorName=iqn.2026-01.org.example:host >/mnt/iscsi/initiatorname.iscsi
	must mount --bind "$tapio_bin" /mnt/bin
	tapio_bin=/mnt/bin
	for writable in /run /tmp /etc/lvm /var/log; do must mount -t tmpfs tmpfs "$writable"; done
	must mount --bind /mnt/iscsi /etc/iscsi
	mkdir -p /run/lock
	export HOME=/tmp LVM_SUPPRESS_FD_WARNINGS=1
	for module in dm-mod fuse loop configfs crc32c md5 sd_mod iscsi_tcp target_core_mod target_core_iblock \
		target_core_file iscsi_target_mod; do
		load "$module"
	done
	must mount -t configfs configfs /sys/kernel/config
	must ip link set lo up
	make_fs
	mount_fs
	target_here
	dd if=/dev/urandom of=/mnt/pattern bs=1M count=16 2>/dev/null || fail "no pattern"
}

sessions() { find /sys/class/iscsi_session -name 'session*' 2>/dev/null | wc -l; }

# wait_for WHAT COMMAND...: until it succeeds.
wait_for() {
	what=$1
	waited=0
	shift
	until "$@"; do
		sleep 0.05
		waited=$((waited + 1))
		[ "$waited" -lt 1200 ] || fail "$what does not happen"
	done
}

# The device_config of the target, as separate words.
portal="device-config:target=127.0.0.1"
account="device-config:chapuser=host device-config:chappassword=$chap_password
	device-config:incoming_chapuser=array device-config:incoming_chappassword=$mutual_password"
whole="$portal device-config:targetIQN=$iqn $account"

# shellcheck disable=SC2086 # One argument for each word.
iscsi_probes() {
	refused 'SR_BACKEND_FAILURE_95' sr-probe type=iscsi
	refused 'SR_BACKEND_FAILURE_141' sr-probe type=iscsi $portal device-config:port=3999
	refused 'SR_BACKEND_FAILURE_96' sr-probe type=iscsi $portal
	for part in '<iscsi-target-iqns>' '<TGT>' "$iqn" '127.0.0.1' '127.0.0.2' '\*'; do
		grep -q "$part" /mnt/.out || fail "the targets lack $part: $(cat /mnt/.out)"
	done
	# A target that tells nobody without a password what it has.
	printf %s host >$config/iscsi/discovery_auth/userid
	printf %s $chap_password >$config/iscsi/discovery_auth/password
	echo 1 >$config/iscsi/discovery_auth/enforce_discovery_auth
	refused 'SR_BACKEND_FAILURE_83' sr-probe type=iscsi $portal
	refused "$iqn" sr-probe type=iscsi $portal device-config:chapuser=host device-config:chappassword=$chap_password
	echo 0 >$config/iscsi/discovery_auth/enforce_discovery_auth
	refused 'SR_BACKEND_FAILURE_68' sr-probe type=iscsi $portal device-config:targetIQN=$iqn
	refused 'SR_BACKEND_FAILURE_68' sr-probe type=iscsi $portal device-config:targetIQN=$iqn \
		device-config:chapuser=host device-config:chappassword=wrong-4711
	ok sr-probe type=iscsi $whole >/mnt/probe
	grep -q '<SRlist' /mnt/probe || fail "the probe found: $(cat /mnt/probe)"
	same "sessions after probes" "$(sessions)" 0
	same "records after probes" "$(find /etc/iscsi/nodes /etc/iscsi/send_targets -type f 2>/dev/null)" ""
}

# The target goes away under a writer, and comes back.
dropped() {
	dd if=/mnt/pattern of="$1" bs=64k oflag=direct,dsync conv=notrunc 2>/mnt/.dd &
	writer=$!
	sleep 0.1
	echo 0 >"$tpg/enable"
	wait_for "the end of the session" busybox grep -q FAILED /sys/class/iscsi_session/session*/state
	sleep 0.5
	kill -0 "$writer" 2>/dev/null || fail "the writer did not wait for its disk: $(cat /mnt/.dd)"
	echo 1 >"$tpg/enable" || fail "the target cannot be switched on again"
	wait "$writer" || fail "the writer over a lost session: $(cat /mnt/.dd)"
	drop_caches
	must cmp -n 16777216 /mnt/pattern "$1"
}

# lun_vdi SR NUMBER: the VDI of a LUN, given by its number.
lun_vdi() { ok vdi-create sr-uuid="$1" name-label="lun$2" virtual-size=4MiB sm-config:LUNid="$2"; }

# shellcheck disable=SC2086 # One argument for each word.
iscsi_luns() {
	sr=$(ok sr-create name-label=luns type=iscsi shared=true $whole)
	same "sessions of an SR" "$(sessions)" 1
	same "who reads the record" "$(find /etc/iscsi/nodes -type f -perm /077)" ""
	names=$(ok vdi-list sr-uuid="$sr" managed=false params=name-label --minimal)
	same "its LUNs" "$(echo "$names" | tr , '\n' | sort | tr '\n' ' ')" "LUN 0 LUN 1 LUN 2 "
	# A second SR has the same session.
	other=$(ok sr-create name-label=again type=iscsi shared=true $whole)
	same "sessions of two SRs" "$(sessions)" 1
	ok pbd-unplug uuid="$(pbd_of "$other")"
	ok sr-forget uuid="$other"
	same "sessions of the SR that is left" "$(sessions)" 1
	refused 'SR_BACKEND_FAILURE_44' vdi-create sr-uuid="$sr" name-label=x virtual-size=1GiB
	# The smallest that is large enough.
	small=$(ok vdi-create sr-uuid="$sr" name-label=small virtual-size=4MiB)
	same "the smallest LUN" "$(ok vdi-param-get uuid="$small" param-name=sm-config param-key=LUNid)" 0
	long=$(lun_vdi "$sr" 1)
	refused 'SR_BACKEND_FAILURE_44' vdi-create sr-uuid="$sr" name-label=x virtual-size=4MiB sm-config:LUNid=1
	same "the size of a LUN" "$(ok vdi-param-get uuid="$long" param-name=virtual-size)" 67108864
	for each in "$small 512" "$long 4096"; do
		vdi=${each% *}
		plugged "$vdi"
		same "the sectors of $each" "$(cat "/sys/block/${node#/dev/}/queue/logical_block_size")" "${each#* }"
		must dd if=/mnt/pattern of="$node" bs=256k oflag=direct conv=fsync
		drop_caches
		must cmp -n 16777216 /mnt/pattern "$node"
		refused "in use\|IN_USE" pbd-unplug uuid="$(pbd_of "$sr")"
		[ "$vdi" = "$small" ] || dropped "$node"
		unplugged
	done
	report "luns=$(seconds)"
	# Detached and attached again.
	ok pbd-unplug uuid="$(pbd_of "$sr")"
	same "sessions of no SR" "$(sessions)" 0
	same "records of no SR" "$(find /etc/iscsi/nodes -type f)" ""
	ok pbd-plug uuid="$(pbd_of "$sr")"
	plugged "$long"
	must cmp -n 16777216 /mnt/pattern "$node"
	unplugged
	refused "not empty\|NOT_EMPTY" sr-destroy uuid="$sr"
	ok vdi-destroy uuid="$long"
	ok vdi-destroy uuid="$small"
	ok sr-destroy uuid="$sr"
	same "sessions after an SR" "$(sessions)" 0
	for secret in $chap_password $mutual_password; do
		grep -q "$secret" /mnt/daemon.log && fail "a password is in the daemon's log"
	done
	true
}

# shellcheck disable=SC2086 # One argument for each word.
iscsi_kills() {
	for step in sr-create:begin sr-attach:logged-in; do
		start_daemon "$step"
		dies sr-create name-label=x type=iscsi $whole
		start_daemon ''
		# What a target has is its SR: there is nothing to be undone.
		sr=$(ok sr-list type=iscsi --minimal)
		same "sessions after a kill at $step" "$(sessions)" 1
		same "its LUNs" "$(ok vdi-list sr-uuid="$sr" managed=false --minimal | tr ',' '\n' | wc -l)" 3
		ok sr-destroy uuid="$sr"
		same "sessions after the SR of a kill at $step" "$(sessions)" 0
		stop_daemon
	done
}

# The kernel's double of an adapter, with a LUN of sectors of 4096 bytes.
adapter_here() {
	driver=$(find "/usr/lib/uml/modules/$(uname -r)" -name 'scsi_debug.ko*')
	must busybox insmod "$driver" dev_size_mb=96 sector_size=4096 delay=0
}

# LUNs behind an adapter.
hba_stories() {
	adapter_here
	ok sr-probe type=hba >/mnt/probe
	refused 'SR_BACKEND_FAILURE_19' sr-probe type=hba device-config:type=qla2xxx
	sr=$(ok sr-create name-label=array type=hba device-config:type=scsi_debug)
	vdi=$(ok vdi-create sr-uuid="$sr" name-label=disk virtual-size=4MiB)
	plugged "$vdi"
	must dd if=/mnt/pattern of="$node" bs=256k oflag=direct conv=fsync
	drop_caches
	must cmp -n 16777216 /mnt/pattern "$node"
	# What is plugged is there at the next scan, too.
	ok sr-scan uuid="$sr"
	same "the LUN in use" "$(ok vdi-param-get uuid="$vdi" param-name=missing)" false
	unplugged
	ok vdi-destroy uuid="$vdi"
	ok sr-destroy uuid="$sr"
}

# scsi_id_of NUMBER: the SCSIid of a LUN in the document of a probe, which `xe` printed with an error.
scsi_id_of() {
	tr -d ' \t\n' </mnt/.out | sed 's/\\[nt]//g' |
		grep -o "<LUNid>$1</LUNid><size>[0-9]*</size><SCSIid>[^<]*" | sed 's/.*>//'
}

# lun_volumes_life TYPE KEYS...: an SR of volumes on a LUN, from its making to its end.
lun_volumes_life() {
	type=$1
	shift
	sr=$(ok sr-create name-label=volumes type="$type" shared=true "$@")
	refused "holds SR $sr\|in use\|IN_USE" sr-create name-label=x type="$type" shared=true "$@"
	vdi=$(ok vdi-create sr-uuid="$sr" name-label=data virtual-size=24MiB)
	plugged "$vdi"
	if [ "$type" = lvmoiscsi ]; then dropped "$node"; else
		must dd if=/mnt/pattern of="$node" bs=256k oflag=direct conv=fsync
	fi
	snapshot=$(ok vdi-snapshot uuid="$vdi")
	must dd if=/dev/zero of="$node" bs=1M count=1 oflag=direct conv=notrunc,fsync
	unplugged
	ok pbd-unplug uuid="$(pbd_of "$sr")"
	same "sessions of no SR" "$(sessions)" 0
	ok sr-probe type="$type" "$@" >/mnt/probe
	same "SRs that the probe finds" "$(grep -c "^[[:space:]]*$sr\$" /mnt/probe)" 1
	ok sr-forget uuid="$sr"
	ok sr-introduce uuid="$sr" name-label=again type="$type" shared=true >/dev/null
	pbd=$(ok pbd-create sr-uuid="$sr" host-uuid="$(ok host-list --minimal)" "$@")
	ok pbd-plug uuid="$pbd"
	plugged "$snapshot" mode=RO
	must cmp -n 16777216 /mnt/pattern "$node"
	unplugged
	plugged "$vdi"
	must cmp -n 15728640 -i 1048576 /mnt/pattern "$node"
	unplugged
	refused "not empty\|NOT_EMPTY" sr-destroy uuid="$sr"
	for each in "$snapshot" "$vdi"; do ok vdi-destroy uuid="$each"; done
	ok sr-destroy uuid="$sr"
	same "sessions after an SR" "$(sessions)" 0
}

# shellcheck disable=SC2086 # One argument for each word.
iscsi_volumes() {
	refused 'SR_BACKEND_FAILURE_96' sr-probe type=lvmoiscsi $portal
	refused 'SR_BACKEND_FAILURE_107' sr-probe type=lvmoiscsi $whole
	for part in '<iscsi-target>' '<LUN>' '<vendor>' '<serial>' '<size>' LIO-ORG tapio-serial-2; do
		grep -q "$part" /mnt/.out || fail "the LUNs lack $part: $(cat /mnt/.out)"
	done
	id=$(scsi_id_of 2)
	[ "${#id}" = 33 ] || fail "LUN 2 has the SCSIid '$id'"
	refused 'SR_BACKEND_FAILURE_67' sr-probe type=lvmoiscsi $whole device-config:SCSIid=36001405ffffffffffffffffffffffffff
	lun_volumes_life lvmoiscsi $whole device-config:SCSIid="$id"
	refused 'SR_BACKEND_FAILURE_107' sr-probe type=lvmohba
	grep -q "<BlockDevice>" /mnt/.out || fail "no disks: $(cat /mnt/.out)"
	id=$(tr -d ' \t\n' </mnt/.out | sed 's/\\[nt]//g' | grep -o '<SCSIid>[^<]*' | head -n 1 | sed 's/.*>//')
	lun_volumes_life lvmohba device-config:SCSIid="$id"
}

# lun_of_one_vdi TYPE KEYS...: an SR of one VDI on a LUN is made, forgotten, found again, and goes with its VDI.
lun_of_one_vdi() {
	type=$1
	shift
	for kind in vhd raw; do
		sr=$(ok sr-create name-label=one type="$type" shared=true device-config:single-vdi=$kind "$@")
		vdi=$(ok vdi-list sr-uuid="$sr" managed=true --minimal)
		[ "${#vdi}" = 36 ] || fail "an SR of one VDI has '$vdi'"
		refused "holds one VDI" vdi-create sr-uuid="$sr" name-label=x virtual-size=4MiB
		refused "have the array copy its LUN" vdi-snapshot uuid="$vdi"
		plugged "$vdi"
		must dd if=/mnt/pattern of="$node" bs=1M oflag=direct conv=notrunc,fsync
		unplugged
		ok pbd-unplug uuid="$(pbd_of "$sr")"
		same "sessions of no SR" "$(sessions)" 0
		ok sr-forget uuid="$sr"
		# The mode is the group's: nobody says it again.
		ok sr-introduce uuid="$sr" name-label=again type="$type" shared=true >/dev/null
		ok pbd-plug uuid="$(ok pbd-create sr-uuid="$sr" host-uuid="$(ok host-list --minimal)" "$@")"
		same "the VDI" "$(ok vdi-list sr-uuid="$sr" managed=true --minimal)" "$vdi"
		refused "holds one VDI" vdi-create sr-uuid="$sr" name-label=x virtual-size=4MiB
		plugged "$vdi" mode=RO
		must cmp -n 16777216 /mnt/pattern "$node"
		unplugged
		ok sr-destroy uuid="$sr"
		same "sessions after an SR" "$(sessions)" 0
	done
	report "$type=$(seconds)"
}

# shellcheck disable=SC2086 # One argument for each word.
case_iscsi_one_vdi() {
	iscsi_here
	adapter_here
	start_daemon
	refused 'SR_BACKEND_FAILURE_107' sr-probe type=lvmoiscsi $whole
	lun_of_one_vdi lvmoiscsi $whole device-config:SCSIid="$(scsi_id_of 2)"
	refused 'SR_BACKEND_FAILURE_107' sr-probe type=lvmohba
	id=$(tr -d ' \t\n' </mnt/.out | sed 's/\\[nt]//g' | grep -o '<SCSIid>[^<]*' | head -n 1 | sed 's/.*>//')
	lun_of_one_vdi lvmohba device-config:SCSIid="$id"
	stop_daemon
}

case_iscsi_volumes() {
	iscsi_here
	adapter_here
	start_daemon
	iscsi_volumes
	report "volumes=$(seconds)"
	stop_daemon
}

case_iscsi() {
	iscsi_here
	report "target=$(seconds)"
	start_daemon
	iscsi_probes
	report "probes=$(seconds)"
	iscsi_luns
	report "again=$(seconds)"
	hba_stories
	report "hba=$(seconds)"
	stop_daemon
	iscsi_kills
	report "kills=$(seconds)"
}
