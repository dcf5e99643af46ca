//! Numbers with names, spelled as the `rdma` tool spells them.

use std::fmt;

use serde::{Serialize, Serializer};

use super::codec::Value;

/// Declares an enum for a numeric attribute. A number that has no name is kept.
macro_rules! codes {
    ($($(#[$meta:meta])* $name:ident: $int:ty {
        $($(#[$doc:meta])* $variant:ident = $number:literal $text:literal,)*
    })*) => {$(
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$doc])* $variant,)*
            /// A number without a name.
            Other($int),
        }

        impl From<$int> for $name {
            fn from(number: $int) -> Self {
                match number {
                    $($number => Self::$variant,)*
                    other => Self::Other(other),
                }
            }
        }

        impl From<$name> for $int {
            fn from(code: $name) -> $int {
                match code {
                    $($name::$variant => $number,)*
                    $name::Other(other) => other,
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$variant => f.write_str($text),)*
                    Self::Other(number) => number.fmt(f),
                }
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl Value for $name {
            fn get(bytes: &[u8]) -> Option<Self> {
                <$int>::get(bytes).map(Self::from)
            }

            fn put(&self, to: &mut Vec<u8>) {
                <$int>::from(*self).put(to);
            }
        }
    )*};
}

codes! {
    /// Who may see a device (`rdma system show netns`).
    NetnsMode: u8 {
        /// A device belongs to one namespace.
        Exclusive = 0 "exclusive",
        /// Every namespace sees every device.
        Shared = 1 "shared",
    }

    /// `enum rdma_node_type`.
    NodeType: u8 {
        /// Channel adapter: InfiniBand or RoCE.
        Ca = 1 "ca",
        /// Switch.
        Switch = 2 "switch",
        /// Router.
        Router = 3 "router",
        /// iWARP.
        Rnic = 4 "rnic",
        /// Cisco usNIC.
        Usnic = 5 "usnic",
        /// Cisco usNIC over UDP.
        UsnicUdp = 6 "usnic_udp",
        /// Something else, such as EFA.
        Unspecified = 7 "unspecified",
    }

    /// `enum ib_port_state`.
    PortState: u8 {
        /// Unknown.
        Nop = 0 "NOP",
        /// No link.
        Down = 1 "DOWN",
        /// Not configured by a subnet manager yet.
        Init = 2 "INIT",
        /// About to be active.
        Armed = 3 "ARMED",
        /// In use.
        Active = 4 "ACTIVE",
        /// In use; the link is interrupted.
        ActiveDefer = 5 "ACTIVE_DEFER",
    }

    /// `enum ib_port_phys_state`.
    PhysicalState: u8 {
        /// Unknown.
        Nop = 0 "NOP",
        /// Asleep.
        Sleep = 1 "SLEEP",
        /// Looks for a partner.
        Polling = 2 "POLLING",
        /// Switched off.
        Disabled = 3 "DISABLED",
        /// Trains.
        Training = 4 "PORT_CONFIGURATION_TRAINING",
        /// Has a partner.
        LinkUp = 5 "LINK_UP",
        /// Recovers.
        Recovery = 6 "LINK_ERROR_RECOVER",
        /// In a test mode.
        PhyTest = 7 "PHY_TEST",
    }

    /// `enum ib_qp_type`.
    QpType: u8 {
        /// QP 0.
        Smi = 0 "SMI",
        /// QP 1.
        Gsi = 1 "GSI",
        /// Reliable connection.
        Rc = 2 "RC",
        /// Unreliable connection.
        Uc = 3 "UC",
        /// Unreliable datagram.
        Ud = 4 "UD",
        /// Raw IPv6.
        RawIpv6 = 5 "RAW_IPV6",
        /// Raw Ethertype.
        RawEthertype = 6 "RAW_ETHERTYPE",
        /// Raw packets.
        RawPacket = 8 "RAW_PACKET",
        /// XRC initiator.
        XrcIni = 9 "XRC_INI",
        /// XRC target.
        XrcTgt = 10 "XRC_TGT",
        /// The driver's own.
        Driver = 255 "DRIVER",
    }

    /// `enum ib_qp_state`.
    QpState: u8 {
        /// Fresh.
        Reset = 0 "RESET",
        /// Takes receives.
        Init = 1 "INIT",
        /// Ready to receive.
        Rtr = 2 "RTR",
        /// Ready to send.
        Rts = 3 "RTS",
        /// Send queue drained.
        Sqd = 4 "SQD",
        /// Send queue in error.
        Sqe = 5 "SQE",
        /// In error.
        Error = 6 "ERR",
    }

    /// `enum ib_mig_state`.
    PathMigration: u8 {
        /// Has moved.
        Migrated = 0 "MIGRATED",
        /// To be armed again.
        Rearm = 1 "REARM",
        /// May move.
        Armed = 2 "ARMED",
    }

    /// `enum rdma_cm_state`.
    CmState: u8 {
        /// Fresh.
        Idle = 0 "IDLE",
        /// Looks for the address.
        AddressQuery = 1 "ADDR_QUERY",
        /// Has the address.
        AddressResolved = 2 "ADDR_RESOLVED",
        /// Looks for the route.
        RouteQuery = 3 "ROUTE_QUERY",
        /// Has the route.
        RouteResolved = 4 "ROUTE_RESOLVED",
        /// Connects, or is connected.
        Connect = 5 "CONNECT",
        /// Disconnects, or is disconnected.
        Disconnect = 6 "DISCONNECT",
        /// Has a local address.
        AddressBound = 7 "ADDR_BOUND",
        /// Listens.
        Listen = 8 "LISTEN",
        /// Its device goes away.
        DeviceRemoval = 9 "DEVICE_REMOVAL",
        /// Goes away.
        Destroying = 10 "DESTROYING",
    }

    /// `enum rdma_nl_notify_event_type`.
    EventKind: u8 {
        /// A device has come.
        Register = 0 "REGISTER",
        /// A device has gone.
        Unregister = 1 "UNREGISTER",
        /// A port has got a network interface.
        NetdevAttach = 2 "NETDEV_ATTACH",
        /// A port has lost its network interface.
        NetdevDetach = 3 "NETDEV_DETACH",
        /// A device has another name.
        Rename = 4 "RENAME",
        /// A port's network interface has another name.
        NetdevRename = 5 "NETDEV_RENAME",
    }

    /// `enum rdma_ucm_port_space`.
    PortSpace: u32 {
        /// IP over InfiniBand.
        IpOverIb = 0x0002 "IPOIB",
        /// InfiniBand's own.
        Ib = 0x013f "IB",
        /// Reliable connections.
        Tcp = 0x0106 "TCP",
        /// Datagrams.
        Udp = 0x0111 "UDP",
    }
}
