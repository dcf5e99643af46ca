//! Access control lists: users and groups that may open a socket beside its owner and its group.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The most entries of one list: far more than a socket of one VM needs, and far below what file
/// systems keep.
pub const ACL_MAX: usize = 32;

/// Whom an entry is about; numbers, since names are the host's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Who {
    /// A user.
    User(u32),
    /// A group.
    Group(u32),
}

/// One entry of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct AclEntry {
    /// Whom it is about.
    pub who: Who,
    /// Permission bits: 4 read, 2 write, 1 execute. Connecting takes write (unix(7)).
    pub bits: u16,
}

impl AclEntry {
    /// Parts of `u:USER:rw` or `g:GROUP:rw`, as setfacl(1) has them: is it a group, who, permission
    /// bits.
    #[must_use]
    pub fn split(text: &str) -> Option<(bool, &str, u16)> {
        let mut parts = text.split(':');
        let group = match parts.next()? {
            "u" | "user" => false,
            "g" | "group" => true,
            _ => return None,
        };
        let who = parts.next().filter(|who| !who.is_empty())?;
        let letters = parts.next().filter(|letters| !letters.is_empty())?;
        if parts.next().is_some() {
            return None;
        }
        let bits = letters.chars().try_fold(0, |bits, letter| match letter {
            'r' => Some(bits | 4),
            'w' => Some(bits | 2),
            'x' => Some(bits | 1),
            '-' => Some(bits),
            _ => None,
        })?;
        Some((group, who, bits))
    }

    /// The permissions as letters, without those that are not given.
    #[must_use]
    pub fn letters(&self) -> String {
        let letters = [(4, 'r'), (2, 'w'), (1, 'x')];
        let given =
            letters.iter().filter(|(bit, _)| self.bits & bit != 0).map(|(_, letter)| letter);
        let text: String = given.collect();
        if text.is_empty() { "-".to_owned() } else { text }
    }
}

impl fmt::Display for AclEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letters = self.letters();
        match self.who {
            Who::User(id) => write!(f, "u:{id}:{letters}"),
            Who::Group(id) => write!(f, "g:{id}:{letters}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{AclEntry, Who};

    #[test]
    fn entries_are_read_as_setfacl_writes_them() {
        assert_eq!(AclEntry::split("u:qemu:rw"), Some((false, "qemu", 6)));
        assert_eq!(AclEntry::split("group:36:rw-"), Some((true, "36", 6)));
        assert_eq!(AclEntry::split("g:36:-"), Some((true, "36", 0)));
        for bad in [
            "", "u", "u:", "u:1", "u:1:", "u::rw", "o::rw", "m::rw", "u:1:rwz", "u:1:6", "u:1:rw:x",
        ] {
            assert_eq!(AclEntry::split(bad), None, "{bad}");
        }
        assert_eq!(AclEntry { who: Who::User(7), bits: 6 }.to_string(), "u:7:rw");
        assert_eq!(AclEntry { who: Who::Group(7), bits: 0 }.to_string(), "g:7:-");
    }
}
