//! Kernel block storage: a target on a RAM disk in guest b, reached by NVMe over RDMA, iSER and
//! SRP, with the same work through fio, whose rates the rows leave in their output.
//!
//! All register each request's memory anew and invalidate it, iSER locally and SRP by the target's
//! SEND_WITH_INV where it can. The target moves the data, by READ and WRITE. fio compares checksums
//! of what it reads back.

use super::super::client::{Client, Ready};

const TARGET: Ready = Ready::Says("target is ready");

/// The device that appears behind a log-in, and what is done with it.
macro_rules! work {
    ($disk:literal, $login:literal, $logout:literal) => {
        concat!(
            "set -e
modprobe sd_mod
",
            $login,
            "
n=0
until [ -n \"$(ls /sys/class/block | grep '^",
            $disk,
            "')\" ]; do sleep 0.1; n=$((n+1)); [ $n -lt 200 ] || { dmesg | tail -20; exit 1; }; done
d=/dev/$(ls /sys/class/block | grep '^",
            $disk,
            "' | head -n 1)
until [ -b $d ]; do sleep 0.1; done
for o in '--rw=randwrite --bs=4k --size=4m' '--rw=randwrite --bs=64k --size=16m' '--rw=write \
    --bs=1m --size=32m'; do
  fio --name=block --filename=$d --direct=1 --ioengine=libaio --iodepth=8 --verify=crc32c \
      --do_verify=1 --verify_fatal=1 $o --output=/tmp/fio.out || { cat /tmp/fio.out; exit 1; }
  grep -E 'READ:|WRITE:' /tmp/fio.out
done
",
            $logout
        )
    };
}

/// What fio writes and reads back.
const BYTES: u64 = 2 * ((4 + 16 + 32) << 20);

pub(super) const CLIENTS: &[Client] = &[
    Client {
        name: "NVMe over RDMA",
        server: "set -e
modprobe brd rd_nr=1 rd_size=65536
modprobe -a nvmet nvmet-rdma
mountpoint -q /sys/kernel/config || mount -t configfs configfs /sys/kernel/config
cd /sys/kernel/config/nvmet
mkdir subsystems/lab
echo 1 > subsystems/lab/attr_allow_any_host
mkdir subsystems/lab/namespaces/1
echo -n /dev/ram0 > subsystems/lab/namespaces/1/device_path
echo 1 > subsystems/lab/namespaces/1/enable
mkdir ports/1
echo rdma > ports/1/addr_trtype
echo ipv4 > ports/1/addr_adrfam
echo 10.9.0.2 > ports/1/addr_traddr
echo 4420 > ports/1/addr_trsvcid
ln -s /sys/kernel/config/nvmet/subsystems/lab ports/1/subsystems/lab
echo target is ready
n=0; until [ -e /host/client.done ]; do sleep 0.2; n=$((n+1)); [ $n -lt 1400 ] || exit 1; done
rm ports/1/subsystems/lab
rmdir ports/1
echo 0 > subsystems/lab/namespaces/1/enable
",
        ready: TARGET,
        client: work!(
            "nvme0n1",
            "modprobe nvme-rdma
nvme connect -t rdma -n lab -a 10.9.0.2 -s 4420 -i 1 > /dev/null",
            "nvme disconnect -n lab > /dev/null"
        ),
        bytes: BYTES,
    },
    Client {
        name: "iSER",
        server: "set -e
modprobe -a target_core_mod iscsi_target_mod ib_isert
mountpoint -q /sys/kernel/config || mount -t configfs configfs /sys/kernel/config
t=/sys/kernel/config/target
mkdir -p $t/core/rd_mcp_0/iser $t/iscsi
echo rd_pages=16384 > $t/core/rd_mcp_0/iser/control
echo 1 > $t/core/rd_mcp_0/iser/enable
i=$t/iscsi/iqn.2026-11.lab:disk/tpgt_1
mkdir -p $i/np/10.9.0.2:3260 $i/lun/lun_0
ln -s $t/core/rd_mcp_0/iser $i/lun/lun_0/disk
echo 1 > $i/np/10.9.0.2:3260/iser
for a in generate_node_acls=1 cache_dynamic_acls=1 demo_mode_write_protect=0 authentication=0; do
  echo ${a#*=} > $i/attrib/${a%=*}
done
echo 1 > $i/enable
echo target is ready
n=0; until [ -e /host/client.done ]; do sleep 0.2; n=$((n+1)); [ $n -lt 1400 ] || exit 1; done
echo 0 > $i/enable
",
        ready: TARGET,
        client: work!(
            "sd",
            "modprobe ib_iser
mkdir -p /run/lock/iscsi
echo InitiatorName=iqn.2026-11.lab:a > /etc/iscsi/initiatorname.iscsi
pidof iscsid > /dev/null || iscsid
iscsiadm -m node -o new -T iqn.2026-11.lab:disk -p 10.9.0.2:3260
iscsiadm -m node -T iqn.2026-11.lab:disk -p 10.9.0.2:3260 -o update -n iface.transport_name -v iser
iscsiadm -m node -T iqn.2026-11.lab:disk -p 10.9.0.2:3260 --login",
            "iscsiadm -m node -T iqn.2026-11.lab:disk --logout"
        ),
        bytes: BYTES,
    },
    Client {
        name: "SRP",
        server: "set -e
modprobe -a target_core_mod ib_srpt
mountpoint -q /sys/kernel/config || mount -t configfs configfs /sys/kernel/config
t=/sys/kernel/config/target
mkdir -p $t/core/rd_mcp_0/srp $t/srpt
echo rd_pages=16384 > $t/core/rd_mcp_0/srp/control
echo 1 > $t/core/rd_mcp_0/srp/enable
echo 4242 > $t/srpt/discovery_auth/rdma_cm_port
name=$(cut -d : -f 5-8 $(ls -d /sys/class/infiniband/*)/ports/1/gids/0)
s=$t/srpt/$name/$name
mkdir -p $s/lun/lun_0
ln -s $t/core/rd_mcp_0/srp $s/lun/lun_0/disk
# An initiator is known by an address of its connection; both are of that one.
for i in 10.9.0.1 10.9.0.2; do
  mkdir -p $s/acls/$i/lun_0
  ln -s $s/lun/lun_0 $s/acls/$i/lun_0/disk
done
echo 1 > $s/enable
echo target is ready
n=0; until [ -e /host/client.done ]; do sleep 0.2; n=$((n+1)); [ $n -lt 1400 ] || exit 1; done
echo 0 > $s/enable
",
        ready: TARGET,
        client: work!(
            "sd",
            // The target's identity is its device's GUID, which follows from the MAC address.
            "modprobe ib_srp
guid=$(tr -d : < $(ls -d /sys/class/infiniband/*)/node_guid | sed 's/1$/2/')
echo id_ext=$guid,ioc_guid=$guid,dest=10.9.0.2:4242 > $(ls -d \
    /sys/class/infiniband_srp/*)/add_target || { dmesg | tail -5; exit 1; }",
            "for r in /sys/class/srp_remote_ports/*; do echo 1 > $r/delete; done"
        ),
        bytes: BYTES,
    },
];
