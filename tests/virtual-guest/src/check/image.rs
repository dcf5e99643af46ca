//! Memory images of `vrdma-check`: patterns of a seed and a position, and layouts of a message in
//! pieces. Both sides of a talk must agree on every byte, so this follows
//! `tests/guest-programs/vrdma-check-image.h`, and a test holds it against that file's numbers.

/// Bytes before and behind a message that nobody may touch.
const GUARD: u32 = 4096;
const MOST_PIECES: u32 = 12;
const MOST_GAP: u32 = 40;

/// Shapes of a message.
pub(super) const SHAPES: u32 = 4;

/// A message in memory: (place, length) in the order of the message, and the bytes that all of it
/// spans with its guards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) pieces: Vec<(u32, u32)>,
    pub(super) span: u32,
}

/// splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
pub(super) fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// Bytes of a region for messages of up to `most` bytes.
pub(super) fn region_len(most: u32) -> u64 {
    u64::from(most + 2 * GUARD + MOST_PIECES * MOST_GAP)
}

fn pattern(out: &mut [u8], seed: u64, from: usize) {
    let mut word = mix(seed.wrapping_add(from as u64 / 8));
    for (at, byte) in (from..).zip(out) {
        if at.is_multiple_of(8) {
            word = mix(seed.wrapping_add(at as u64 / 8));
        }
        *byte = (word >> (at % 8 * 8)) as u8;
    }
}

/// What is everywhere where no message is.
pub(super) fn background(out: &mut [u8], seed: u64) {
    pattern(out, !seed, 0);
}

/// Shape 0: one piece. 1: two. 2: five, the second of them empty. 3: many, the last first in
/// memory. Odd gaps between.
pub(super) fn layout(len: u32, shape: u32, seed: u64, most_pieces: u32) -> Layout {
    let count = match shape {
        0 => 1,
        1 => 2,
        2 => 5,
        _ => MOST_PIECES,
    };
    let count = count.min(most_pieces);
    let mut left = len;
    let mut pieces: Vec<(u32, u32)> = (0..count)
        .map(|i| {
            let last = i == count - 1;
            let mut part = if last { left } else { left / (count - i) };
            if !last && left > 0 {
                let more = mix(seed.wrapping_add(i.into())) % (u64::from(part) + 1);
                part = ((u64::from(part) + more) % (u64::from(left) + 1)) as u32;
            }
            if shape == 2 && i == 1 {
                part = if last { left } else { 0 };
            }
            left -= part;
            (0, part)
        })
        .collect();
    let mut at = GUARD;
    for k in 0..count {
        let i = if shape == 3 { count - 1 - k } else { k };
        at += (mix(seed.wrapping_add(100 + u64::from(k))) % u64::from(MOST_GAP)) as u32;
        pieces[i as usize].0 = at;
        at += pieces[i as usize].1;
    }
    Layout { pieces, span: at + GUARD }
}

impl Layout {
    /// Where the message begins.
    pub(super) fn first(&self) -> u32 {
        self.pieces[0].0
    }

    /// Puts the message of `seed` into an image.
    pub(super) fn place(&self, image: &mut [u8], seed: u64) {
        let mut done = 0;
        for &(at, len) in &self.pieces {
            let (at, len) = (at as usize, len as usize);
            pattern(&mut image[at..at + len], seed, done);
            done += len;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Printed by a program around `vrdma-check-image.h`.
    #[test]
    fn images_are_those_of_the_program_in_c() {
        type Case = ((u32, u32, u64, u32), &'static [(u32, u32)], u32, u64);
        const CASES: &[Case] = &[
            ((0, 0, 1, 4), &[(4127, 0)], 8223, 0xd477_59e8_9706_8eb1),
            ((4097, 1, 77, 4), &[(4125, 3404), (7549, 693)], 12_338, 0xfe3d_880b_fca1_707a),
            (
                (65_537, 2, 12_345_678_901_234, 4),
                &[(4134, 27_290), (31_456, 0), (31_481, 31_332), (62_832, 6915)],
                73_843,
                0x1b5e_e58e_ffbf_de16,
            ),
            (
                (63, 2, 5, 12),
                &[(4107, 22), (4131, 0), (4151, 22), (4201, 11), (4226, 8)],
                8330,
                0x368c_186c_feaf_27b7,
            ),
            ((1025, 3, 9, 2), &[(4527, 615), (4110, 410)], 9238, 0x62a1_9747_588e_db36),
        ];
        for &((len, shape, seed, most), pieces, span, digest) in CASES {
            let made = layout(len, shape, seed, most);
            assert_eq!((&made.pieces[..], made.span), (pieces, span), "{len} {shape}");
            let mut image = vec![0; span as usize];
            background(&mut image, seed + 1);
            made.place(&mut image, seed);
            let seen = image.iter().fold(0, |hash, byte| mix(hash ^ u64::from(*byte)));
            assert_eq!(seen, digest, "{len} {shape}");
        }
    }
}
