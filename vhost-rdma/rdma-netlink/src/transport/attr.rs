//! Attributes: `(length, type, value)` with padding to four bytes. No I/O.

use netlink_packet_core::{NLA_HEADER_SIZE, NLA_TYPE_MASK, NlaBuffer, NlasIterator};

/// Appends one attribute of bytes.
pub(crate) fn put(to: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let start = to.len();
    to.extend_from_slice(&[0; NLA_HEADER_SIZE]);
    to.extend_from_slice(value);
    close(to, start, kind);
}

/// Appends one attribute, whose value `fill` appends.
///
/// The length field has 16 bits; what does not fit is no request of ours, so it is cut where the
/// kernel would refuse it anyway.
pub(crate) fn put_nested(to: &mut Vec<u8>, kind: u16, fill: impl FnOnce(&mut Vec<u8>)) {
    let start = to.len();
    to.extend_from_slice(&[0; NLA_HEADER_SIZE]);
    fill(to);
    close(to, start, kind);
}

fn close(to: &mut Vec<u8>, start: usize, kind: u16) {
    let longest = start + usize::from(u16::MAX);
    to.truncate(longest);
    let length = u16::try_from(to.len() - start).unwrap_or(u16::MAX);
    if let Some(header) = to.get_mut(start..start + NLA_HEADER_SIZE) {
        let [a, b] = length.to_ne_bytes();
        let [c, d] = kind.to_ne_bytes();
        header.copy_from_slice(&[a, b, c, d]);
    }
    to.resize(to.len().next_multiple_of(4), 0);
}

/// The attributes in `bytes`, each as (type without flags, value). Ends at the first that is
/// malformed.
pub(crate) fn each(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    raw(bytes).map(|nla| (nla.kind() & NLA_TYPE_MASK, value(&nla)))
}

/// The value of an undecoded attribute.
pub(crate) fn value<'a>(nla: &NlaBuffer<&'a [u8]>) -> &'a [u8] {
    // The library's own accessor borrows the view instead of the bytes.
    nla.into_inner().get(NLA_HEADER_SIZE..usize::from(nla.length())).unwrap_or_default()
}

/// The same, undecoded.
pub(crate) fn raw(bytes: &[u8]) -> impl Iterator<Item = NlaBuffer<&[u8]>> {
    NlasIterator::new(bytes).map_while(|nla| nla.ok())
}

/// Text ends at the first zero byte, whether or not there is one.
pub(crate) fn text(value: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes(value)).ok()
}

/// The same, of any bytes.
pub(crate) fn bytes(value: &[u8]) -> &[u8] {
    value.split(|byte| *byte == 0).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop, proptest};

    use super::{each, put, put_nested, text};

    proptest! {
        #[test]
        fn attributes_round_trip(
            list in prop::collection::vec(
                (0..0x3fff_u16, prop::collection::vec(any::<u8>(), 0..40)), 0..12
            )
        ) {
            let mut bytes = Vec::new();
            put_nested(&mut bytes, 7, |inner| {
                list.iter().for_each(|(kind, value)| put(inner, *kind, value));
            });
            let outer: Vec<_> = each(&bytes).collect();
            assert_eq!(outer.len(), 1);
            let inner: Vec<_> =
                each(outer[0].1).map(|(kind, value)| (kind, value.to_vec())).collect();
            assert_eq!(inner, list);
        }

        #[test]
        fn any_bytes_end(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            for (_, value) in each(&bytes) {
                let _ = text(value);
                assert!(each(value).count() <= value.len());
            }
        }
    }
}
