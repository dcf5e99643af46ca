//! The 40 bytes in front of a datagram (IBTA 11.4.1.2; for RoCE v2, annex A17): the network header
//! that a wire would have carried.
//!
//! libibverbs tells IPv4 from IPv6 by these bytes alone and checks the IPv4 header's checksum
//! (ibv_init_ah_from_wc), so they must be right.

use crate::link::{Flow, GRH_LEN, Gid};

const UDP: u8 = 17;
/// UDP header, BTH, DETH and ICRC around the payload.
const OVERHEAD: u32 = 8 + 12 + 8 + 4;
const IPV4_HEADER: usize = 20;

/// The GRH area of a datagram with `payload` bytes.
pub fn build(flow: &Flow, payload: u32) -> [u8; GRH_LEN as usize] {
    // A datagram is at most one MTU, so its length fits 16 bits.
    let length = u16::try_from(OVERHEAD + payload.next_multiple_of(4)).unwrap_or(u16::MAX);
    if is_ipv4(&flow.source_gid) { ipv4(flow, length) } else { ipv6(flow, length) }
}

fn ipv4(flow: &Flow, length: u16) -> [u8; GRH_LEN as usize] {
    let mut area = [0; GRH_LEN as usize];
    let header = &mut area[IPV4_HEADER..];
    header[0] = 0x45;
    header[1] = flow.traffic_class;
    header[2..4].copy_from_slice(&(length + 20).to_be_bytes());
    // Don't fragment: RoCE packets never are.
    header[6] = 0x40;
    header[8] = flow.hop_limit.max(1);
    header[9] = UDP;
    header[12..16].copy_from_slice(&flow.source_gid[12..]);
    header[16..20].copy_from_slice(&flow.dest_gid[12..]);
    let sum = checksum(header);
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    area
}

fn ipv6(flow: &Flow, length: u16) -> [u8; GRH_LEN as usize] {
    let mut area = [0; GRH_LEN as usize];
    area[0] = 0x60 | flow.traffic_class >> 4;
    area[1] = flow.traffic_class << 4;
    area[4..6].copy_from_slice(&length.to_be_bytes());
    area[6] = UDP;
    area[7] = flow.hop_limit.max(1);
    area[8..24].copy_from_slice(&flow.source_gid);
    area[24..40].copy_from_slice(&flow.dest_gid);
    area
}

/// The Internet checksum (RFC 1071) of a header whose checksum field is zero.
fn checksum(header: &[u8]) -> u16 {
    let sum: u32 =
        header.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let folded = (folded & 0xffff) + (folded >> 16);
    !u16::try_from(folded).unwrap_or(u16::MAX)
}

/// Whether a GID is an IPv4-mapped address.
pub fn is_ipv4(gid: &Gid) -> bool {
    gid[..10] == [0; 10] && gid[10..12] == [0xff, 0xff]
}

#[cfg(test)]
mod tests {
    use super::checksum;

    #[test]
    fn checksum_of_a_known_header() {
        // RFC 1071 style example: the header below carries checksum 0xb861.
        let header = [
            0x45, 0x00, 0x00, 0x73, 0x00, 0x00, 0x40, 0x00, 0x40, 0x11, 0x00, 0x00, 0xc0, 0xa8,
            0x00, 0x01, 0xc0, 0xa8, 0x00, 0xc7,
        ];
        assert_eq!(checksum(&header), 0xb861);
    }
}
