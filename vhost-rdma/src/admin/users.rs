//! Users and groups of the host, by name or number.

use nix::unistd::{Gid, Group, Uid, User};

use crate::node::{ACL_MAX, AclEntry, Who};

/// A name that the host does not know.
#[derive(Debug, thiserror::Error)]
pub enum UserError {
    /// No such user.
    #[error(
        "there is no user {0:?} on this host; name one that `getent passwd` shows, or give a number"
    )]
    NoUser(String),
    /// No such group.
    #[error(
        "there is no group {0:?} on this host; name one that `getent group` shows, or give a number"
    )]
    NoGroup(String),
    /// Not an entry of an access control list.
    #[error("{0:?} is no entry of an access control list; write u:USER:rw or g:GROUP:rw")]
    BadAcl(String),
    /// The list names somebody twice.
    #[error("the access control list has {0} twice")]
    AclTwice(String),
    /// The list is too long.
    #[error("the access control list has {0} entries, the most are {ACL_MAX}")]
    LongAcl(usize),
}

/// The number of a user.
///
/// # Errors
/// [`UserError::NoUser`].
pub fn user_id(text: &str) -> Result<u32, UserError> {
    if let Some(id) = number(text) {
        return Ok(id);
    }
    match User::from_name(text) {
        Ok(Some(user)) => Ok(user.uid.as_raw()),
        _ => Err(UserError::NoUser(text.to_owned())),
    }
}

/// The number of a group.
///
/// # Errors
/// [`UserError::NoGroup`].
pub fn group_id(text: &str) -> Result<u32, UserError> {
    if let Some(id) = number(text) {
        return Ok(id);
    }
    match Group::from_name(text) {
        Ok(Some(group)) => Ok(group.gid.as_raw()),
        _ => Err(UserError::NoGroup(text.to_owned())),
    }
}

/// An access control list.
///
/// # Errors
/// An entry is not of the form `u:USER:rw` or `g:GROUP:rw`, names nobody that the host knows, or
/// somebody twice.
pub(super) fn acl(texts: &[String]) -> Result<Vec<AclEntry>, UserError> {
    if texts.len() > ACL_MAX {
        return Err(UserError::LongAcl(texts.len()));
    }
    let mut list = texts.iter().map(|text| acl_entry(text)).collect::<Result<Vec<_>, _>>()?;
    list.sort_unstable();
    let twice = list.windows(2).find_map(|pair| match pair {
        [a, b] if a.who == b.who => Some(acl_text(b)),
        _ => None,
    });
    twice.map_or(Ok(list), |who| Err(UserError::AclTwice(who)))
}

fn acl_entry(text: &str) -> Result<AclEntry, UserError> {
    let (group, who, bits) =
        AclEntry::split(text).ok_or_else(|| UserError::BadAcl(text.to_owned()))?;
    let who = if group { Who::Group(group_id(who)?) } else { Who::User(user_id(who)?) };
    Ok(AclEntry { who, bits })
}

/// An entry with the name of whom it is about.
#[must_use]
pub(super) fn acl_text(entry: &AclEntry) -> String {
    let letters = entry.letters();
    match entry.who {
        Who::User(id) => format!("u:{}:{letters}", user_name(id)),
        Who::Group(id) => format!("g:{}:{letters}", group_name(id)),
    }
}

/// The greatest 32-bit value means "unchanged" to chown(2), so it names nobody.
fn number(text: &str) -> Option<u32> {
    text.parse().ok().filter(|id| *id != u32::MAX)
}

/// A user's name, or the number if it has none.
#[must_use]
pub fn user_name(id: u32) -> String {
    User::from_uid(Uid::from_raw(id))
        .ok()
        .flatten()
        .map_or_else(|| id.to_string(), |user| user.name)
}

/// A group's name, or the number if it has none.
#[must_use]
pub fn group_name(id: u32) -> String {
    Group::from_gid(Gid::from_raw(id))
        .ok()
        .flatten()
        .map_or_else(|| id.to_string(), |group| group.name)
}

#[cfg(test)]
mod tests {
    use super::{acl, acl_text, group_id, user_id, user_name};

    #[test]
    fn names_and_numbers() {
        assert_eq!(user_id("root").ok(), Some(0));
        assert_eq!(user_id("12345").ok(), Some(12345));
        assert_eq!(group_id("root").ok(), Some(0));
        assert_eq!(user_name(0), "root");
        assert!(user_id("no-such-user").is_err());
        assert!(group_id("").is_err());
        assert!(user_id("4294967295").is_err());
    }

    #[test]
    fn lists_have_names_and_numbers_and_nobody_twice() {
        let list =
            |texts: &[&str]| acl(&texts.iter().map(|&text| text.to_owned()).collect::<Vec<_>>());
        let read = list(&["g:54321:rw", "user:root:rw"]).unwrap();
        assert_eq!(read.iter().map(acl_text).collect::<Vec<_>>(), ["u:root:rw", "g:54321:rw"]);
        for (texts, word) in [
            (&["u:0:rw", "u:root:r"][..], "u:root:r"),
            (&["u:no-such-user:rw"][..], "no-such-user"),
            (&["root:rw"][..], "u:USER:rw"),
            (&["u:1:rw"; 33][..], "33"),
        ] {
            assert!(list(texts).unwrap_err().to_string().contains(word), "{texts:?}");
        }
    }
}
