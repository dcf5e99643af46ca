//! What a context owns: its objects of each kind, as a list that goes through the objects.
//!
//! A NIC of many processes has as many objects as they like, and the end of one of them is to cost
//! what that one has. So each object knows its neighbours among those of its context, and the
//! context knows the first. Nobody has to look for anything, and a list takes no memory but two
//! numbers of each object, which are charged with it. (Keys have theirs beside them, in
//! [`super::owned_numbers`]: a work request looks at what a key opens, and at nothing else of it.)

use super::chunks::Chunks;
use super::recent::Recent;
use super::table::Table;

/// A kind of objects of which a context has a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holding {
    /// Queue pairs.
    Qp,
    /// Shared receive queues.
    Srq,
    /// Address handles.
    Ah,
    /// Protection domains.
    Pd,
    /// Completion queues.
    Cq,
}

/// How many kinds there are.
const KINDS: usize = Holding::Cq as usize + 1;

/// An object's place among those of its context.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Links {
    before: Option<u32>,
    behind: Option<u32>,
}

/// An object that a context owns.
pub(crate) trait Owned {
    const KIND: Holding;
    fn ctx(&self) -> u32;
    fn links(&mut self) -> &mut Links;
}

/// Says so of a type with the fields `ctx` and `links`.
macro_rules! owned {
    ($kind:ident, [$($generics:tt)*], $object:ty) => {
        impl<$($generics)*> Owned for $object {
            const KIND: Holding = Holding::$kind;

            fn ctx(&self) -> u32 {
                self.ctx
            }

            fn links(&mut self) -> &mut Links {
                &mut self.links
            }
        }
    };
}
pub(crate) use owned;

/// A table of objects.
pub(crate) trait Objects<T> {
    fn object(&mut self, number: u32) -> Option<&mut T>;
}

impl<T> Objects<T> for Table<T> {
    fn object(&mut self, number: u32) -> Option<&mut T> {
        self.get_mut(number as usize)
    }
}

impl<T> Objects<T> for Chunks<T> {
    fn object(&mut self, number: u32) -> Option<&mut T> {
        self.get_mut(number as usize)
    }
}

impl<T> Objects<T> for Recent<Box<T>> {
    fn object(&mut self, number: u32) -> Option<&mut T> {
        self.get_mut(&number).map(Box::as_mut)
    }
}

/// The first of a context's objects of each kind.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Heads([Option<u32>; KINDS]);

impl Heads {
    /// The first of a kind.
    pub(crate) const fn first(&self, kind: Holding) -> Option<u32> {
        self.0[kind as usize]
    }

    /// A new object is the first.
    pub(crate) fn join<T: Owned>(&mut self, table: &mut impl Objects<T>, number: u32) {
        let Some(object) = table.object(number) else { return };
        let behind = self.0[T::KIND as usize].replace(number);
        *object.links() = Links { before: None, behind };
        if let Some(next) = behind.and_then(|next| table.object(next)) {
            next.links().before = Some(number);
        }
    }

    /// An object ends, and is still in its table.
    pub(crate) fn leave<T: Owned>(&mut self, table: &mut impl Objects<T>, number: u32) {
        let Some(object) = table.object(number) else { return };
        let Links { before, behind } = std::mem::take(object.links());
        if let Some(next) = behind.and_then(|next| table.object(next)) {
            next.links().before = before;
        }
        let head = &mut self.0[T::KIND as usize];
        match before.and_then(|last| table.object(last)) {
            Some(last) => last.links().behind = behind,
            None if *head == Some(number) => *head = behind,
            // It was in no list: its context came to be after it.
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default)]
    struct Thing {
        ctx: u32,
        links: Links,
    }

    owned!(Ah, [], Thing);

    /// Those of a context, from the first on.
    fn walk(heads: &Heads, table: &mut Chunks<Thing>) -> Vec<u32> {
        let mut next = heads.first(Holding::Ah);
        let mut all = Vec::new();
        while let Some(number) = next {
            all.push(number);
            next = table.object(number).unwrap().links.behind;
        }
        all
    }

    #[test]
    fn a_list_has_what_joined_and_has_not_left() {
        let (mut table, mut heads) = (Chunks::default(), Heads::default());
        for number in 0..7 {
            table.insert(Thing::default());
            heads.join(&mut table, number);
        }
        assert_eq!(walk(&heads, &mut table), [6, 5, 4, 3, 2, 1, 0]);
        // The first, the last, one between, one that is gone, and one that there never was.
        for (number, left) in [
            (6, vec![5, 4, 3, 2, 1, 0]),
            (0, vec![5, 4, 3, 2, 1]),
            (3, vec![5, 4, 2, 1]),
            (3, vec![5, 4, 2, 1]),
            (99, vec![5, 4, 2, 1]),
        ] {
            heads.leave(&mut table, number);
            table.try_remove(number as usize);
            assert_eq!(walk(&heads, &mut table), left, "without {number}");
        }
        // One that is in no list takes nobody along.
        let stray = u32::try_from(table.insert(Thing::default())).unwrap();
        heads.leave(&mut table, stray);
        assert_eq!(walk(&heads, &mut table), [5, 4, 2, 1]);
        [5, 2, 1, 4].into_iter().for_each(|number| heads.leave(&mut table, number));
        assert_eq!(heads.first(Holding::Ah), None);
    }
}
