//! A part of a list: each Nth of it, from the Kth on. CI takes long lists by turns.

use std::str::FromStr;

/// Each `step`th of a list, from the one with the number `first` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    first: u32,
    step: u32,
}

impl Part {
    /// All of it.
    pub const ALL: Self = Self { first: 0, step: 1 };

    /// The part whose turn it is at a number, of `parts`.
    #[must_use]
    pub fn turn(number: u32, parts: u32) -> Self {
        Self { first: number % parts.max(1), step: parts.max(1) }
    }

    /// Whether it has the one at this place.
    #[must_use]
    pub fn has(self, place: usize) -> bool {
        place % self.step as usize == self.first as usize
    }
}

impl Default for Part {
    fn default() -> Self {
        Self::ALL
    }
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.first, self.step)
    }
}

impl FromStr for Part {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts =
            text.split_once('/').and_then(|(k, n)| Some((k.parse().ok()?, n.parse().ok()?)));
        let (first, step) = parts.ok_or("two numbers, such as 0/2")?;
        if first < step { Ok(Self { first, step }) } else { Err("K is less than N") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_list_are_the_list() {
        for parts in 1..5 {
            for place in 0..20 {
                let having = (0..parts).filter(|&turn| Part::turn(turn, parts).has(place));
                assert_eq!(having.count(), 1, "place {place} of {parts} parts");
            }
        }
        assert!((0..20).all(|place| Part::ALL.has(place)));
    }

    #[test]
    fn what_is_printed_can_be_typed() {
        for text in ["0/1", "6/15"] {
            assert_eq!(text.parse::<Part>().unwrap().to_string(), text);
        }
        for bad in ["", "1", "1/1", "2/1", "0/0", "a/b", "-1/2"] {
            bad.parse::<Part>().unwrap_err();
        }
    }
}
