//! Messages as lists of attributes, both ways. No I/O.
//!
//! A message is declared once ([`messages!`]): which field is which attribute, and whether it must
//! be there. The decoder skips what it does not know, takes an attribute of a wrong length as
//! absent, and refuses a message only if a required one is missing.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use crate::transport::attr;
use crate::{Error, Guid};

/// Something that is encoded as attributes of NLDEV.
pub trait Message: Sized {
    /// Reads the payload of a netlink message (what follows `struct nlmsghdr`).
    ///
    /// # Errors
    /// [`Error::Decode`] if a required attribute is missing.
    fn decode(payload: &[u8]) -> Result<Self, Error>;

    /// Appends the attributes.
    fn encode(&self, to: &mut Vec<u8>);
}

/// The value of one attribute.
pub(super) trait Value: Sized {
    /// `None` if the bytes cannot be one.
    fn get(bytes: &[u8]) -> Option<Self>;
    fn put(&self, to: &mut Vec<u8>);
}

/// An element of a list: messages under one attribute, each in an attribute of this kind.
pub(super) trait Element: Message {
    const KIND: u16;
}

macro_rules! integers {
    ($($int:ty),*) => {$(
        impl Value for $int {
            /// Takes a narrower number as well: some attributes differ from their description.
            fn get(bytes: &[u8]) -> Option<Self> {
                match *bytes {
                    [a] => Some(Self::from(a)),
                    [a, b] => Self::try_from(u16::from_ne_bytes([a, b])).ok(),
                    [a, b, c, d] => Self::try_from(u32::from_ne_bytes([a, b, c, d])).ok(),
                    [a, b, c, d, e, f, g, h] => {
                        Self::try_from(u64::from_ne_bytes([a, b, c, d, e, f, g, h])).ok()
                    }
                    _ => None,
                }
            }

            fn put(&self, to: &mut Vec<u8>) {
                to.extend_from_slice(&self.to_ne_bytes());
            }
        }
    )*};
}

integers!(u8, u32, u64);

impl Value for bool {
    fn get(bytes: &[u8]) -> Option<Self> {
        u8::get(bytes).map(|number| number != 0)
    }

    fn put(&self, to: &mut Vec<u8>) {
        u8::from(*self).put(to);
    }
}

impl Value for Guid {
    fn get(bytes: &[u8]) -> Option<Self> {
        u64::get(bytes).map(Self)
    }

    fn put(&self, to: &mut Vec<u8>) {
        self.0.put(to);
    }
}

impl Value for String {
    fn get(bytes: &[u8]) -> Option<Self> {
        attr::text(bytes).map(str::to_owned)
    }

    fn put(&self, to: &mut Vec<u8>) {
        to.extend_from_slice(self.as_bytes());
        to.push(0);
    }
}

const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;
/// `struct __kernel_sockaddr_storage`.
const SOCKADDR_STORAGE: usize = 128;

impl Value for SocketAddr {
    fn get(bytes: &[u8]) -> Option<Self> {
        let (family, rest) = bytes.split_first_chunk::<2>()?;
        let (port, rest) = rest.split_first_chunk::<2>()?;
        let port = u16::from_be_bytes(*port);
        let (first, rest) = rest.split_first_chunk::<4>()?;
        match u16::from_ne_bytes(*family) {
            AF_INET => Some(Self::new(IpAddr::V4(Ipv4Addr::from(*first)), port)),
            AF_INET6 => {
                let (address, rest) = rest.split_first_chunk::<16>()?;
                let scope = rest.first_chunk::<4>()?;
                Some(Self::V6(SocketAddrV6::new(
                    Ipv6Addr::from(*address),
                    port,
                    u32::from_be_bytes(*first),
                    u32::from_ne_bytes(*scope),
                )))
            }
            _ => None,
        }
    }

    fn put(&self, to: &mut Vec<u8>) {
        let end = to.len() + SOCKADDR_STORAGE;
        let port = self.port().to_be_bytes();
        match self {
            Self::V4(v4) => {
                to.extend_from_slice(&AF_INET.to_ne_bytes());
                to.extend_from_slice(&port);
                to.extend_from_slice(&v4.ip().octets());
            }
            Self::V6(v6) => {
                to.extend_from_slice(&AF_INET6.to_ne_bytes());
                to.extend_from_slice(&port);
                to.extend_from_slice(&v6.flowinfo().to_be_bytes());
                to.extend_from_slice(&v6.ip().octets());
                to.extend_from_slice(&v6.scope_id().to_ne_bytes());
            }
        }
        to.resize(end, 0);
    }
}

impl<T: Element> Value for Vec<T> {
    /// An element that makes no sense is left out: the others are no worse for it.
    fn get(bytes: &[u8]) -> Option<Self> {
        let elements = attr::each(bytes).filter(|(kind, _)| *kind == T::KIND);
        Some(elements.filter_map(|(_, value)| T::decode(value).ok()).collect())
    }

    fn put(&self, to: &mut Vec<u8>) {
        for element in self {
            attr::put_nested(to, T::KIND, |to| element.encode(to));
        }
    }
}

/// One attribute of a request.
pub(super) fn put(to: &mut Vec<u8>, kind: u16, value: &impl Value) {
    attr::put_nested(to, kind, |to| value.put(to));
}

/// The list under attribute `kind` in an answer; empty if there is none.
pub(super) fn list<T: Element>(payload: &[u8], kind: u16) -> Vec<T> {
    attr::each(payload)
        .find(|(found, _)| *found == kind)
        .and_then(|(_, value)| Vec::get(value))
        .unwrap_or_default()
}

/// Declares messages; `in KIND` makes one an element of a list.
macro_rules! messages {
    ($(
        $(#[$meta:meta])*
        $name:ident $(in $kind:ident)? {
            $($(#[$rdoc:meta])* $required:ident: $rtype:ty = $rkind:ident,)*
            $(; $($(#[$odoc:meta])* $optional:ident: $otype:ty = $okind:ident,)*)?
        }
    )*) => {$(
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
        pub struct $name {
            $($(#[$rdoc])* pub $required: $rtype,)*
            $($(
                $(#[$odoc])*
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $optional: Option<$otype>,
            )*)?
        }

        impl $crate::rdma::Message for $name {
            fn decode(payload: &[u8]) -> $crate::Result<Self> {
                use $crate::rdma::{codec::Value, constants::attribute};
                $(let mut $required: Option<$rtype> = None;)*
                $($(let mut $optional: Option<$otype> = None;)*)?
                for (kind, value) in $crate::transport::attr::each(payload) {
                    match kind {
                        $(attribute::$rkind => $required = <$rtype as Value>::get(value),)*
                        $($(attribute::$okind => $optional = <$otype as Value>::get(value),)*)?
                        _ => {}
                    }
                }
                Ok(Self {
                    $($required: $required.ok_or_else(|| {
                        $crate::rdma::codec::missing(stringify!($name), stringify!($required))
                    })?,)*
                    $($($optional,)*)?
                })
            }

            fn encode(&self, to: &mut Vec<u8>) {
                use $crate::rdma::constants::attribute;
                $($crate::rdma::codec::put(to, attribute::$rkind, &self.$required);)*
                $($(if let Some(value) = &self.$optional {
                    $crate::rdma::codec::put(to, attribute::$okind, value);
                })*)?
            }
        }

        $(impl $crate::rdma::codec::Element for $name {
            const KIND: u16 = $crate::rdma::constants::attribute::$kind;
        })?
    )*};
}

pub(super) use messages;

pub(super) fn missing(message: &str, field: &str) -> Error {
    Error::decode(format!("read a {message}"), format!("it has no {field}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{Strategy, any, prop, proptest};

    use super::{Message, Value};
    use crate::rdma::resource::{
        CompletionQueue, ConnectionId, Context, MemoryRegion, ProtectionDomain, QueuePair,
        ResourceCount, SharedReceiveQueue,
    };
    use crate::rdma::{CharDevice, Counter, Device, Event, Port, System};
    use crate::transport::attr;

    /// Attributes that a message may well have: most numbers are of the protocol, most lengths are
    /// of a number.
    fn soup() -> impl Strategy<Value = Vec<u8>> {
        let length = prop::sample::select(vec![0_usize, 1, 1, 4, 4, 4, 8, 8, 8, 3, 28, 128]);
        let value = length.prop_flat_map(|length| prop::collection::vec(any::<u8>(), length));
        prop::collection::vec((0..120_u16, value), 0..60).prop_map(|list| {
            let mut bytes = Vec::new();
            list.iter().for_each(|(kind, value)| attr::put(&mut bytes, *kind, value));
            bytes
        })
    }

    /// What was read can be written, and then reads the same. True if there was something to read.
    fn settles<T: Message + PartialEq + std::fmt::Debug>(bytes: &[u8]) -> bool {
        let Ok(message) = T::decode(bytes) else { return false };
        let mut again = Vec::new();
        message.encode(&mut again);
        assert_eq!(T::decode(&again).unwrap(), message);
        true
    }

    fn all(bytes: &[u8]) -> usize {
        [
            settles::<Device>(bytes),
            settles::<Port>(bytes),
            settles::<System>(bytes),
            settles::<CharDevice>(bytes),
            settles::<ResourceCount>(bytes),
            settles::<QueuePair>(bytes),
            settles::<ConnectionId>(bytes),
            settles::<CompletionQueue>(bytes),
            settles::<MemoryRegion>(bytes),
            settles::<ProtectionDomain>(bytes),
            settles::<Context>(bytes),
            settles::<SharedReceiveQueue>(bytes),
            settles::<Counter>(bytes),
            settles::<Event>(bytes),
        ]
        .into_iter()
        .filter(|read| *read)
        .count()
    }

    /// The smallest and the fullest message of each kind.
    #[test]
    fn every_message_can_be_read() {
        let mut bytes = Vec::new();
        for kind in 1..120 {
            attr::put(&mut bytes, kind, &[1]);
        }
        assert_eq!(all(&bytes), 14);
        assert_eq!(all(&[]), 1, "only the system has no required attribute");
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_an_error(
            bytes in prop::collection::vec(any::<u8>(), 0..400)
        ) {
            all(&bytes);
        }

        #[test]
        fn any_attributes_settle(bytes in soup()) {
            assert!(all(&bytes) >= 1);
        }

        #[test]
        fn a_device_round_trips(
            index: u32, name in "[a-z0-9_]{1,63}", ports: Option<u32>, caps: Option<u64>,
            guid: Option<u64>, node: u8, dim: Option<bool>,
            protocol in prop::option::of("[a-z]{0,8}")
        ) {
            let device = Device {
                index, name, ports,
                capabilities: caps,
                firmware: None,
                node_guid: guid.map(crate::Guid),
                system_image_guid: None,
                node_type: Some(node.into()),
                adaptive_moderation: dim,
                protocol,
                device_type: None,
                parent: None,
            };
            let mut bytes = Vec::new();
            device.encode(&mut bytes);
            assert_eq!(Device::decode(&bytes).unwrap(), device);
        }

        #[test]
        fn addresses_round_trip(address: std::net::SocketAddr) {
            let mut bytes = Vec::new();
            address.put(&mut bytes);
            assert_eq!(bytes.len(), 128);
            assert_eq!(std::net::SocketAddr::get(&bytes), Some(address));
        }

        #[test]
        fn lists_round_trip(list in prop::collection::vec(("[a-z_]{0,20}", any::<u64>()), 0..20)) {
            let counters: Vec<Counter> =
                list.into_iter().map(|(name, value)| Counter { name, value }).collect();
            let mut bytes = Vec::new();
            counters.put(&mut bytes);
            assert_eq!(Vec::get(&bytes), Some(counters));
        }
    }
}
