//! Users and groups of the host, by name or number.

use nix::unistd::{Gid, Group, Uid, User};

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
    use super::{group_id, user_id, user_name};

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
}
