//! What daemons say to each other: one kind of message, a management datagram of a network. Bytes
//! in, messages out; no I/O.
//!
//! ```text
//!  2 bytes  length of what follows
//!  1        kind: 1
//!  1        length of the network's name, 1 to 63
//!  n        the name
//!  16, 16   addresses of sender and receiver, as the guests name them
//!  1, 1     traffic class, service level
//!  256      the datagram
//! ```
//! Numbers are big-endian. The version of the protocol is agreed on by TLS (ALPN), so there is none
//! here.

use crate::cm::{MAD_LEN, Mad};

const KIND_MAD: u8 = 1;
const NAME_MAX: usize = 63;
/// What surrounds the name: kind, its length, two addresses, class and level, the datagram.
const FIXED: usize = 1 + 1 + 16 + 16 + 1 + 1 + MAD_LEN;
const LONGEST: usize = FIXED + NAME_MAX;

/// A datagram of a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) network: String,
    pub(super) mad: Mad,
}

/// The other side does not speak this.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it sent what is no message")]
pub(super) struct BadFrame;

impl Frame {
    /// The message as it is sent; a network whose name does not fit has none.
    pub(super) fn encode(&self) -> Option<Vec<u8>> {
        let name = self.network.as_bytes();
        let name_len = u8::try_from(name.len()).ok().filter(|&len| (1..=63).contains(&len))?;
        let len = u16::try_from(FIXED + name.len()).ok()?;
        let mut bytes = Vec::with_capacity(2 + FIXED + name.len());
        bytes.extend_from_slice(&len.to_be_bytes());
        bytes.extend_from_slice(&[KIND_MAD, name_len]);
        bytes.extend_from_slice(name);
        bytes.extend_from_slice(&self.mad.source);
        bytes.extend_from_slice(&self.mad.dest);
        bytes.extend_from_slice(&[self.mad.traffic_class, self.mad.sl]);
        bytes.extend_from_slice(&self.mad.bytes);
        Some(bytes)
    }
}

/// Bytes of a connection, until they are messages.
#[derive(Debug, Default)]
pub(super) struct Decoder {
    bytes: Vec<u8>,
}

impl Decoder {
    /// Takes what has arrived. The caller takes all messages before it brings more, so less than
    /// one message is ever kept.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next message, if it is all there.
    pub(super) fn next(&mut self) -> Result<Option<Frame>, BadFrame> {
        let Some((head, rest)) = self.bytes.split_first_chunk::<2>() else { return Ok(None) };
        let len = usize::from(u16::from_be_bytes(*head));
        if !(FIXED + 1..=LONGEST).contains(&len) {
            return Err(BadFrame);
        }
        let Some(body) = rest.get(..len) else { return Ok(None) };
        let frame = parse(body).ok_or(BadFrame)?;
        self.bytes.drain(..2 + len);
        Ok(Some(frame))
    }
}

fn parse(body: &[u8]) -> Option<Frame> {
    let ([kind, name_len], rest) = body.split_first_chunk::<2>()?;
    if *kind != KIND_MAD {
        return None;
    }
    let (name, rest) = rest.split_at_checked(usize::from(*name_len))?;
    let network = std::str::from_utf8(name).ok().filter(|name| !name.is_empty())?.to_owned();
    let (source, rest) = rest.split_first_chunk::<16>()?;
    let (dest, rest) = rest.split_first_chunk::<16>()?;
    let ([traffic_class, sl], rest) = rest.split_first_chunk::<2>()?;
    let bytes = <[u8; MAD_LEN]>::try_from(rest).ok()?;
    let (traffic_class, sl) = (*traffic_class, *sl);
    Some(Frame { network, mad: Mad { source: *source, dest: *dest, traffic_class, sl, bytes } })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(name: &str) -> Frame {
        let mad = Mad {
            source: [1; 16],
            dest: [2; 16],
            traffic_class: 3,
            sl: 4,
            bytes: std::array::from_fn(|n| u8::try_from(n).unwrap_or(0)),
        };
        Frame { network: name.to_owned(), mad }
    }

    #[test]
    fn messages_come_out_as_they_went_in_however_they_are_cut() {
        let sent = [frame("a"), frame(&"n".repeat(63)), frame("default")];
        let bytes: Vec<u8> = sent.iter().flat_map(|frame| frame.encode().unwrap()).collect();
        for piece in [1, 2, 3, 290, 291, 1000, bytes.len()] {
            let mut decoder = Decoder::default();
            let mut received = Vec::new();
            for part in bytes.chunks(piece) {
                decoder.push(part);
                while let Some(frame) = decoder.next().unwrap() {
                    received.push(frame);
                }
            }
            assert_eq!(received, sent);
            assert!(decoder.bytes.is_empty());
        }
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let good = frame("net").encode().unwrap();
        let change = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            bytes
        };
        let cases = [
            ("too short", vec![0, 10]),
            ("too long", vec![0xff, 0xff]),
            ("kind", change(2, 2)),
            ("no name", change(3, 0)),
            ("name too long", change(3, 4)),
            ("name beyond the end", change(3, 255)),
            ("name not text", change(4, 0xff)),
        ];
        for (what, bytes) in cases {
            let mut decoder = Decoder::default();
            decoder.push(&bytes);
            assert_eq!(decoder.next(), Err(BadFrame), "{what}");
        }
        assert_eq!(frame("").encode(), None);
        assert_eq!(frame(&"n".repeat(64)).encode(), None);
    }

    proptest! {
        #[test]
        fn nothing_is_kept_beyond_a_message_and_nothing_panics(
            bytes in proptest::collection::vec(any::<u8>(), 0..2000),
            valid_head in any::<bool>(),
        ) {
            let mut decoder = Decoder::default();
            if valid_head {
                decoder.push(&frame("x").encode().unwrap()[..4]);
            }
            decoder.push(&bytes);
            while let Ok(Some(_)) = decoder.next() {}
            if decoder.next().is_ok() {
                prop_assert!(decoder.bytes.len() < 2 + LONGEST);
            }
        }
    }
}
