//! How much of a message a NIC moves in one piece.
//!
//! A piece is what cannot be interrupted, so its length is what a neighbour waits for at least.
//! Memory that is there is copied at the same speed always, and a piece of [`PIECE`] bytes is
//! short. But a page that is touched for the first time is allocated and cleared meanwhile, which
//! takes fifty times as long as copying it, and the guest chooses what it leaves untouched: 32
//! pages for 128 KiB, or for 32 elements of a byte. So a NIC whose pieces last longer than they are
//! worth moves smaller ones, half as large each time, and larger ones again when they come in time.

use super::Nanos;
use crate::link::PIECE;
use crate::nic::budget::Looked;
use crate::nic::limits::MAX_SGE;

/// What may last longer than it was charged for, beside [`FACTOR`] times the charge.
const SLACK: Nanos = 10_000;
/// A slow machine is no reason to cut.
const FACTOR: Nanos = 4;
/// Elements of the largest work request.
const ELEMENTS: usize = MAX_SGE as usize;
/// Halvings: a page, and one element.
const SMALLEST: u32 = 5;

/// See the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pace {
    halvings: u32,
}

impl Pace {
    /// Takes note of how long the last pieces took.
    #[inline]
    pub(crate) const fn judge(&mut self, looked: Looked) {
        let in_time = looked.charged.saturating_mul(FACTOR).saturating_add(SLACK);
        if looked.lasted <= in_time {
            self.halvings = self.halvings.saturating_sub(1);
        } else if self.halvings < SMALLEST {
            self.halvings += 1;
        }
    }

    /// Length of the piece that begins behind `done` bytes of a message whose elements have these
    /// lengths; an element that is cut is cut at [`PIECE`] halved, and never below a page.
    #[inline]
    pub(super) fn piece(self, lengths: impl Iterator<Item = u32>, done: u32, total: u32) -> u32 {
        let left = (total - done).min(PIECE);
        if self.halvings == 0 { left } else { self.cut(lengths, done, left) }
    }

    /// Bytes and elements that go in one piece, whatever they are.
    #[inline]
    pub(super) const fn whole(self) -> (u32, usize) {
        (PIECE >> self.halvings, ELEMENTS >> self.halvings)
    }

    #[cold]
    fn cut(self, lengths: impl Iterator<Item = u32>, done: u32, left: u32) -> u32 {
        let most = (PIECE >> self.halvings).min(left);
        let (mut end, mut taken) = (0u32, 0);
        for len in lengths {
            end = end.saturating_add(len);
            taken += usize::from(end > done);
            if taken == ELEMENTS >> self.halvings {
                return most.min(end - done);
            }
        }
        most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn looked(charged: Nanos, lasted: Nanos) -> Looked {
        Looked { charged, lasted }
    }

    /// The pieces of a message.
    fn pieces(pace: Pace, lengths: &[u32]) -> Vec<u32> {
        let total = lengths.iter().sum();
        let (mut done, mut pieces) = (0, Vec::new());
        while done < total {
            let len = pace.piece(lengths.iter().copied(), done, total);
            assert!(len > 0, "{lengths:?} at {done}");
            done += len;
            pieces.push(len);
        }
        assert_eq!(done, total);
        pieces
    }

    fn slow(times: u32) -> Pace {
        let mut pace = Pace::default();
        (0..times).for_each(|_| pace.judge(looked(1_000, 100_000)));
        pace
    }

    #[test]
    fn pieces_that_come_in_time_are_large() {
        let mut pace = Pace::default();
        pace.judge(looked(16_000, 70_000));
        assert_eq!(pieces(pace, &[3 * PIECE + 1]), [PIECE, PIECE, PIECE, 1]);
    }

    #[test]
    fn slow_ones_are_halved_down_to_a_page_and_an_element() {
        assert_eq!(pieces(slow(1), &[PIECE]), [PIECE / 2; 2]);
        assert_eq!(pieces(slow(9), &[PIECE]), [4096; 32]);
        assert_eq!(pieces(slow(1), &[1; 32]), [16, 16]);
        assert_eq!(pieces(slow(9), &[1; 32]), [1; 32]);
        assert_eq!(pieces(slow(9), &[0, 5, 0, 0, 5000, 1]), [5, 4096, 904, 1]);
        assert_eq!(pieces(slow(4), &[8; 5]), [16, 16, 8]);
    }

    #[test]
    fn what_goes_whole_is_not_cut() {
        for times in [0, 1, 3, 9] {
            let pace = slow(times);
            let (bytes, elements) = pace.whole();
            let lengths = vec![bytes / u32::try_from(elements).unwrap(); elements];
            assert_eq!(pieces(pace, &lengths).len(), 1, "{times}");
            assert_eq!(pieces(pace, &[bytes]), [bytes]);
            assert!(elements > 0, "{times}");
        }
    }

    #[test]
    fn they_grow_again_one_piece_in_time_after_the_other() {
        let mut pace = slow(9);
        for halvings in (0..5).rev() {
            pace.judge(looked(1_000, 9_000));
            assert_eq!(pace, Pace { halvings });
        }
        pace.judge(looked(1_000, 9_000));
        assert_eq!(pace, Pace::default());
    }

    #[test]
    fn a_clock_that_stands_still_changes_nothing() {
        let mut pace = Pace::default();
        pace.judge(looked(1_000_000, 0));
        assert_eq!(pace, Pace::default());
    }
}
