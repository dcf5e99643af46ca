//! Who may open a NIC's socket beside its owner and group.

use serde::Deserialize;

/// An entry of an access control list, `u:NUMBER:rw` or `g:NUMBER:rw`; the daemon understands it,
/// here it is only made sure that it will.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct AclEntry(String);

impl AclEntry {
    /// As the daemon's API has it.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for AclEntry {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let mut parts = text.split(':');
        let good = matches!(parts.next(), Some("u" | "g"))
            && parts.next().and_then(|id| id.parse::<u32>().ok()).is_some_and(|id| id != u32::MAX)
            && parts.next().is_some_and(|letters| {
                !letters.is_empty() && letters.bytes().all(|letter| b"rwx-".contains(&letter))
            })
            && parts.next().is_none();
        if good {
            return Ok(Self(text));
        }
        Err(format!(
            "acl entry {text:?} is not valid: write \"u:107:rw\" or \"g:36:rw\", with numbers of \
             the host"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::AclEntry;

    #[test]
    fn entries_have_numbers() {
        for good in ["u:107:rw", "g:0:-", "u:1:rwx"] {
            assert!(AclEntry::try_from(good.to_owned()).is_ok(), "{good}");
        }
        for bad in [
            "",
            "u:root:rw",
            "user:1:rw",
            "o:1:rw",
            "u:1",
            "u:1:",
            "u:1:q",
            "u:1:rw:",
            "u:4294967295:rw",
            "u:-1:rw",
        ] {
            assert!(AclEntry::try_from(bad.to_owned()).unwrap_err().contains("u:107:rw"), "{bad}");
        }
    }
}
