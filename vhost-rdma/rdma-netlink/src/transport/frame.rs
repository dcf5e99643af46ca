//! Netlink messages in a datagram. No I/O.

use netlink_packet_core::{
    NLM_F_DUMP_INTR, NLMSG_DONE, NLMSG_ERROR, NLMSG_NOOP, NLMSG_OVERRUN, NetlinkBuffer,
};

use super::attr;

/// `struct nlmsghdr`.
pub(crate) const HEADER: usize = 16;

/// Attributes of an extended acknowledgement (`enum nlmsgerr_attrs` of `linux/netlink.h`).
const NLMSGERR_ATTR_MSG: u16 = 1;
/// The request in the error message is cut after its header; TLVs follow.
const NLM_F_CAPPED: u16 = 0x100;
const NLM_F_ACK_TLVS: u16 = 0x200;

/// One message.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Frame<'a> {
    pub(crate) sequence: u32,
    pub(crate) kind: Kind<'a>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Kind<'a> {
    /// An answer, or an event.
    Data {
        message_type: u16,
        /// The objects changed while they were listed.
        interrupted: bool,
        payload: &'a [u8],
    },
    /// The end of a list, an acknowledgement (`errno` is 0) or a refusal.
    End { errno: i32, message: Option<String> },
    /// Nothing to care about.
    Noop,
}

/// A request: header and payload.
pub(crate) fn request(message_type: u16, flags: u16, sequence: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; HEADER];
    bytes.extend_from_slice(payload);
    let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    let mut header = NetlinkBuffer::new(&mut bytes);
    header.set_length(length);
    header.set_message_type(message_type);
    header.set_flags(flags);
    header.set_sequence_number(sequence);
    bytes
}

/// The messages in a datagram, up to the first malformed one, which is `Err` with the reason.
pub(crate) fn frames(mut bytes: &[u8]) -> impl Iterator<Item = Result<Frame<'_>, String>> {
    std::iter::from_fn(move || {
        if bytes.is_empty() {
            return None;
        }
        let buffer = match NetlinkBuffer::new_checked(bytes) {
            Ok(buffer) => buffer,
            Err(error) => {
                bytes = &[];
                return Some(Err(error.to_string()));
            }
        };
        let length = usize::try_from(buffer.length()).unwrap_or(usize::MAX);
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(frame(&buffer))
    })
}

fn frame<'a>(buffer: &NetlinkBuffer<&'a [u8]>) -> Result<Frame<'a>, String> {
    let payload = buffer.payload();
    let kind = match buffer.message_type() {
        NLMSG_NOOP => Kind::Noop,
        NLMSG_OVERRUN => return Err("the kernel lost messages".to_owned()),
        NLMSG_ERROR => end(buffer.flags(), payload, true)?,
        // A dump may end with an error, and with TLVs right after it (no copy of the request).
        NLMSG_DONE => end(buffer.flags(), payload, false)?,
        message_type => {
            Kind::Data { message_type, interrupted: buffer.flags() & NLM_F_DUMP_INTR != 0, payload }
        }
    };
    Ok(Frame { sequence: buffer.sequence_number(), kind })
}

fn end<'a>(flags: u16, payload: &[u8], with_request: bool) -> Result<Kind<'a>, String> {
    let Some((code, rest)) = payload.split_first_chunk::<4>() else {
        // Old kernels may end a dump with nothing.
        return if with_request {
            Err("an acknowledgement without a code".to_owned())
        } else {
            Ok(Kind::End { errno: 0, message: None })
        };
    };
    let errno = i32::from_ne_bytes(*code).checked_neg().unwrap_or(i32::MAX);
    let mut message = None;
    if flags & NLM_F_ACK_TLVS != 0 {
        let tlvs = if with_request { after_request(flags, rest) } else { rest };
        message = attr::each(tlvs)
            .find(|(kind, _)| *kind == NLMSGERR_ATTR_MSG)
            .and_then(|(_, value)| attr::text(value))
            .filter(|text| !text.is_empty())
            .map(str::to_owned);
    }
    // A dump ends with the length of its last part on some kernels: a positive code is no error.
    Ok(Kind::End { errno: errno.max(0), message })
}

/// What follows the (possibly cut) request in an error message.
fn after_request(flags: u16, rest: &[u8]) -> &[u8] {
    let length = if flags & NLM_F_CAPPED != 0 {
        HEADER
    } else {
        let length = rest.first_chunk::<4>().map_or(0, |bytes| u32::from_ne_bytes(*bytes));
        usize::try_from(length).unwrap_or(usize::MAX).max(HEADER)
    };
    let aligned = length.checked_next_multiple_of(4).unwrap_or(usize::MAX);
    rest.get(aligned..).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use netlink_packet_core::NLMSG_ERROR;
    use proptest::prelude::{any, prop, proptest};

    use super::{Frame, Kind, NLM_F_ACK_TLVS, NLM_F_CAPPED, frames, request};
    use crate::transport::attr;

    fn refusal(errno: i32, flags: u16, original: &[u8], text: &str) -> Vec<u8> {
        let mut payload = (-errno).to_ne_bytes().to_vec();
        payload.extend_from_slice(original);
        payload.resize(payload.len().next_multiple_of(4), 0);
        attr::put(&mut payload, 2, &[1, 2, 3, 4]);
        attr::put(&mut payload, 1, format!("{text}\0").as_bytes());
        request(NLMSG_ERROR, flags, 9, &payload)
    }

    #[test]
    fn the_kernels_words_are_found_behind_whole_and_cut_requests() {
        let original = request(5121, 5, 9, &[8, 0, 1, 0, 3, 0, 0, 0]);
        for (flags, original) in
            [(NLM_F_ACK_TLVS, &original[..]), (NLM_F_ACK_TLVS | NLM_F_CAPPED, &original[..16])]
        {
            let bytes = refusal(22, flags, original, "Not that one");
            let found: Vec<_> = frames(&bytes).collect();
            let kind = Kind::End { errno: 22, message: Some("Not that one".to_owned()) };
            assert_eq!(found, [Ok(Frame { sequence: 9, kind })]);
        }
    }

    #[test]
    fn messages_of_one_datagram_are_taken_one_by_one() {
        let mut bytes = request(5121, 2, 1, &[1, 2, 3]);
        bytes.push(0);
        bytes.extend(request(3, 2, 1, &0_i32.to_ne_bytes()));
        let kinds: Vec<_> = frames(&bytes).map(|frame| frame.unwrap().kind).collect();
        assert_eq!(
            kinds,
            [
                Kind::Data { message_type: 5121, interrupted: false, payload: &[1, 2, 3] },
                Kind::End { errno: 0, message: None }
            ]
        );
    }

    proptest! {
        #[test]
        fn any_bytes_end(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            assert!(frames(&bytes).count() <= bytes.len() / 16 + 1);
        }

        #[test]
        fn any_error_message_is_read(
            flags: u16,
            payload in prop::collection::vec(any::<u8>(), 0..80)
        ) {
            for frame in frames(&request(NLMSG_ERROR, flags, 1, &payload)) {
                if let Ok(Frame { kind: Kind::End { errno, .. }, .. }) = frame {
                    assert!(errno >= 0);
                }
            }
        }
    }
}
