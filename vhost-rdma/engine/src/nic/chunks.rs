//! Objects that are numbered by their place, in a table that never grows in one go.
//!
//! A vector that is full moves everything it has to a larger one: milliseconds for the thousands of
//! queue pairs that a guest may have, in the middle of a turn, and a neighbour waits for them. So
//! this is many small [`Slab`]s. One that is full stays where it is. (Objects by a number that the
//! device chose at random are in [`super::shards`], for the same reason.)

use slab::Slab;

/// Bytes of a small table: what is moved at most. Copying them takes some microseconds.
const BYTES: usize = 32 << 10;
/// Places that a small table has at least, however large its objects are.
const LEAST: u32 = 16;

/// See the module.
#[derive(Debug)]
pub struct Chunks<T> {
    chunks: Vec<Slab<T>>,
    /// Those with a vacant place; the last gives the next.
    roomy: Vec<usize>,
    len: usize,
}

impl<T> Default for Chunks<T> {
    fn default() -> Self {
        Self { chunks: Vec::new(), roomy: Vec::new(), len: 0 }
    }
}

impl<T> Chunks<T> {
    /// Places of a small table, as a power of two.
    const SHIFT: u32 = {
        let fit = (BYTES / (size_of::<T>() + size_of::<usize>())).ilog2();
        if fit < LEAST.ilog2() { LEAST.ilog2() } else { fit }
    };
    const PLACES: usize = 1 << Self::SHIFT;

    const fn parts(number: usize) -> (usize, usize) {
        (number >> Self::SHIFT, number & (Self::PLACES - 1))
    }

    /// Objects.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Places that there are, used or not.
    pub fn places(&self) -> usize {
        let Some(last) = self.chunks.last() else { return 0 };
        ((self.chunks.len() - 1) << Self::SHIFT) + last.capacity().min(Self::PLACES)
    }

    /// The number that the next object gets.
    pub fn vacant_key(&self) -> usize {
        let at = self.roomy.last().copied().unwrap_or(self.chunks.len());
        at << Self::SHIFT | self.chunks.get(at).map_or(0, Slab::vacant_key)
    }

    /// Adds an object; its number.
    pub fn insert(&mut self, object: T) -> usize {
        let at = self.roomy.last().copied().unwrap_or_else(|| {
            self.roomy.push(self.chunks.len());
            self.chunks.push(Slab::new());
            self.chunks.len() - 1
        });
        let chunk = &mut self.chunks[at];
        let place = chunk.insert(object);
        if chunk.len() == Self::PLACES {
            self.roomy.pop();
        }
        self.len += 1;
        at << Self::SHIFT | place
    }

    /// The object of a number.
    #[inline]
    pub fn get(&self, number: usize) -> Option<&T> {
        let (at, place) = Self::parts(number);
        self.chunks.get(at)?.get(place)
    }

    /// The same.
    #[inline]
    pub fn get_mut(&mut self, number: usize) -> Option<&mut T> {
        let (at, place) = Self::parts(number);
        self.chunks.get_mut(at)?.get_mut(place)
    }

    /// Whether a number has an object.
    pub fn contains(&self, number: usize) -> bool {
        self.get(number).is_some()
    }

    /// Takes an object out.
    pub fn try_remove(&mut self, number: usize) -> Option<T> {
        let (at, place) = Self::parts(number);
        let chunk = self.chunks.get_mut(at)?;
        let was_full = chunk.len() == Self::PLACES;
        let object = chunk.try_remove(place)?;
        if was_full {
            self.roomy.push(at);
        }
        self.len -= 1;
        Some(object)
    }

    /// All objects with their numbers, which ascend.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        self.chunks.iter().enumerate().flat_map(|(at, chunk)| {
            chunk.iter().map(move |(place, object)| (at << Self::SHIFT | place, object))
        })
    }

    /// The same.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (usize, &mut T)> {
        self.chunks.iter_mut().enumerate().flat_map(|(at, chunk)| {
            chunk.iter_mut().map(move |(place, object)| (at << Self::SHIFT | place, object))
        })
    }
}

/// With these numbers. All places below the highest are made, too, so the caller bounds it.
impl<T> FromIterator<(usize, T)> for Chunks<T> {
    fn from_iter<I: IntoIterator<Item = (usize, T)>>(objects: I) -> Self {
        let mut parts: Vec<Vec<(usize, T)>> = Vec::new();
        for (number, object) in objects {
            let (at, place) = Self::parts(number);
            if parts.len() <= at {
                parts.resize_with(at + 1, Vec::new);
            }
            parts[at].push((place, object));
        }
        let chunks: Vec<Slab<T>> =
            parts.into_iter().map(|objects| objects.into_iter().collect()).collect();
        let roomy = (0..chunks.len()).rev().filter(|&at| chunks[at].len() < Self::PLACES);
        let (roomy, len) = (roomy.collect(), chunks.iter().map(Slab::len).sum());
        Self { chunks, roomy, len }
    }
}

#[cfg(test)]
mod tests {
    use super::Chunks;

    /// As large as a queue pair.
    type Large = [u64; 64];

    #[test]
    fn what_is_in_it_never_moves_once_a_small_table_is_full() {
        let mut table = Chunks::<Large>::default();
        let places = Chunks::<Large>::PLACES;
        assert!((16..100).contains(&places), "{places}");
        (0..places).for_each(|n| assert_eq!(table.insert([n as u64; 64]), n));
        let at: Vec<*const Large> = table.iter().map(|(_, object)| &raw const *object).collect();
        (places..50_000).for_each(|n| assert_eq!(table.insert([n as u64; 64]), n));
        assert!(table.iter().zip(&at).all(|((_, object), &at)| std::ptr::eq(object, at)));
        assert_eq!((table.len(), table.get(49_999)), (50_000, Some(&[49_999; 64])));
        assert!(table.places() >= 50_000 && table.places() < 50_000 + 2 * places);
    }

    #[test]
    fn a_place_is_given_again_and_a_number_names_one_object() {
        let mut table = Chunks::<Large>::default();
        let places = Chunks::<Large>::PLACES;
        (0..3 * places).for_each(|n| assert_eq!(table.insert([n as u64; 64]), n));
        for number in [places + 3, 7, places + 4, 3 * places - 1] {
            assert_eq!(table.try_remove(number), Some([number as u64; 64]));
            assert!(table.try_remove(number).is_none() && !table.contains(number));
        }
        let mut again: Vec<usize> = (0..4)
            .map(|_| {
                let next = table.vacant_key();
                assert_eq!(table.insert([0; 64]), next);
                next
            })
            .collect();
        again.sort_unstable();
        assert_eq!(again, [7, places + 3, places + 4, 3 * places - 1]);
        assert_eq!((table.vacant_key(), table.len()), (3 * places, 3 * places));
        table.iter_mut().for_each(|(number, object)| object[0] = number as u64);
        assert!(table.iter().all(|(number, object)| object[0] == number as u64));
        assert_eq!(table.get_mut(9 * places), None);
    }

    #[test]
    fn one_that_is_made_of_numbers_goes_on_with_what_is_vacant() {
        let places = Chunks::<Large>::PLACES;
        let numbers = [2, 3 * places + 1, 0];
        let mut table: Chunks<Large> = numbers.iter().map(|&n| (n, [n as u64; 64])).collect();
        assert_eq!(table.iter().map(|(number, _)| number).collect::<Vec<_>>(), [0, 2, numbers[1]]);
        assert!(table.places() > numbers[1]);
        let mut seen: std::collections::HashSet<usize> = numbers.into();
        for _ in 0..4 * places {
            let number = table.insert([0; 64]);
            assert!(seen.insert(number), "{number} is taken");
        }
        assert_eq!(table.len(), seen.len());
    }
}
