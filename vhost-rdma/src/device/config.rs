//! The configuration space (docs/virtio-rdma.md §4).

use virtio_rdma_abi::{ABI_VERSION, Config, MAGIC};
use zerocopy::IntoBytes;

use super::queues::QueueLayout;

/// What the guest reads in probe.
pub(super) fn space(mac: [u8; 6], layout: QueueLayout) -> Config {
    Config {
        magic: MAGIC.into(),
        abi_version: ABI_VERSION.into(),
        num_comp_vectors: layout.comp_vectors().into(),
        num_kick_queues: layout.kick_queues().into(),
        mac,
        reserved: [0; 46],
    }
}

/// Exactly `size` bytes from `offset` on: the framework answers anything else with an error, which
/// is fatal to some VMMs. Beyond the end there are zeroes. The framework bounds `size` by what fits
/// in one message.
pub(super) fn read(config: &Config, offset: u32, size: u32) -> Vec<u8> {
    let bytes = config.as_bytes();
    let start = (offset as usize).min(bytes.len());
    let end = (offset as usize).saturating_add(size as usize).min(bytes.len());
    let mut out = bytes[start..end].to_vec();
    out.resize(size as usize, 0);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_window_has_the_size_asked_for() {
        let config = space([2, 0, 0, 0, 0, 9], QueueLayout::default());
        let whole = read(&config, 0, 64);
        assert_eq!(&whole[..4], b"RDMA");
        assert_eq!(&whole[8..18], [4, 0, 2, 0, 2, 0, 0, 0, 0, 9]);
        for (offset, size) in [(0, 0), (0, 256), (60, 8), (64, 4), (65, 1), (u32::MAX, 16), (12, 6)]
        {
            let window = read(&config, offset, size);
            assert_eq!(window.len(), size as usize);
            for (i, byte) in window.iter().enumerate() {
                let expected = whole.get(offset as usize + i).copied().unwrap_or(0);
                assert_eq!(*byte, expected, "offset {offset} + {i}");
            }
        }
    }
}
