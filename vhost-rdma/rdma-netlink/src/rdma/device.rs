//! Devices, ports, the system, character devices.

use super::code::{NetnsMode, NodeType, PhysicalState, PortState};
use super::codec::messages;
use crate::Guid;

messages! {
    /// An RDMA device.
    Device {
        /// Identifies it on this host, whatever its name and namespace.
        index: u32 = DEV_INDEX,
        /// Its name at this moment.
        name: String = DEV_NAME,
        ;
        /// Number of ports, which are counted from 1.
        ports: u32 = PORT_INDEX,
        /// `IB_DEVICE_…` capabilities.
        capabilities: u64 = CAP_FLAGS,
        /// Firmware, in the vendor's words.
        firmware: String = FW_VERSION,
        /// GUID of the node.
        node_guid: Guid = NODE_GUID,
        /// GUID of the system that it is part of.
        system_image_guid: Guid = SYS_IMAGE_GUID,
        /// What it is in its fabric.
        node_type: NodeType = DEV_NODE_TYPE,
        /// CQ moderation adapts itself.
        adaptive_moderation: bool = DEV_DIM,
        /// `ib`, `roce`, `iw`, `opa`, `usnic`.
        protocol: String = DEV_PROTOCOL,
        /// Kind of a sub-device.
        device_type: u8 = DEV_TYPE,
        /// Device of which it is a part.
        parent: String = PARENT_NAME,
    }

    /// A port of a device.
    Port {
        /// Its device.
        device_index: u32 = DEV_INDEX,
        /// Its device's name.
        device: String = DEV_NAME,
        /// Its number, from 1.
        port: u32 = PORT_INDEX,
        ;
        /// Capability masks.
        capabilities: u64 = CAP_FLAGS,
        /// InfiniBand subnet.
        subnet_prefix: Guid = SUBNET_PREFIX,
        /// Local identifier.
        lid: u32 = LID,
        /// Local identifier of the subnet manager.
        sm_lid: u32 = SM_LID,
        /// LID mask control.
        lmc: u8 = LMC,
        /// Logical state.
        state: PortState = PORT_STATE,
        /// Physical state.
        physical_state: PhysicalState = PORT_PHYS_STATE,
        /// Its network interface, if that is in the socket's namespace (RoCE, iWARP).
        netdev_index: u32 = NDEV_INDEX,
        /// The name of that.
        netdev: String = NDEV_NAME,
    }

    /// What holds for all devices.
    System {
        ;
        /// Who may see a device; kernels before 5.1 do not say.
        netns_mode: NetnsMode = SYS_NETNS_MODE,
        /// Registered memory is copied at fork.
        copy_on_fork: bool = SYS_COPY_ON_FORK,
        /// Users need no privilege for Q_Keys with the high bit.
        privileged_qkey: bool = SYS_PRIVILEGED_QKEY_MODE,
        /// Devices are announced ([`Monitor`](super::Monitor)).
        monitor: bool = SYS_MONITOR_MODE,
    }

    /// A character device of the RDMA subsystem.
    CharDevice {
        /// Name under `/dev/infiniband`.
        name: String = CHARDEV_NAME,
        /// Device number, in the encoding of `dev_t`.
        number: u64 = CHARDEV,
        /// Version of its interface.
        abi: u64 = CHARDEV_ABI,
        ;
        /// The RDMA device behind it.
        device_index: u32 = DEV_INDEX,
        /// `enum rdma_driver_id`.
        driver_id: u32 = UVERBS_DRIVER_ID,
    }
}
