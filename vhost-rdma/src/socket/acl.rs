//! The kernel's form of a POSIX access control list: the value of the extended attribute
//! `system.posix_acl_access` (include/uapi/linux/posix_acl_xattr.h, posix_acl.h).
//!
//! A header with the version, then entries of tag, permissions and number, little-endian, in the
//! order of their tags: owner, named users, owning group, named groups, mask, others (acl(5)). The
//! mask is the most that anyone but owner and others gets; `chmod` and `stat` show it in the place
//! of the group's bits, so here it is all that somebody is given.

use std::io;
use std::path::Path;

use rustix::fs::XattrFlags;
use rustix::io::Errno;

use crate::node::{AclEntry, Who};

const ATTRIBUTE: &str = "system.posix_acl_access";
const VERSION: u32 = 2;
const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;
/// The number of an entry that names nobody.
const UNDEFINED: u32 = u32::MAX;

/// Takes a list away, so that the mode alone counts.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    match rustix::fs::lremovexattr(path, ATTRIBUTE) {
        Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Sets a list beside the mode that the file has.
pub(super) fn set(path: &Path, mode: u32, entries: &[AclEntry]) -> io::Result<()> {
    Ok(rustix::fs::lsetxattr(path, ATTRIBUTE, &value(mode, entries), XattrFlags::empty())?)
}

fn value(mode: u32, entries: &[AclEntry]) -> Vec<u8> {
    let class = |shift: u32| u16::try_from(mode >> shift & 0o7).unwrap_or_default();
    let named = |entry: &AclEntry| match entry.who {
        Who::User(id) => (USER, entry.bits, id),
        Who::Group(id) => (GROUP, entry.bits, id),
    };
    let mask = entries.iter().fold(class(3), |mask, entry| mask | entry.bits);
    let mut all: Vec<(u16, u16, u32)> = entries.iter().map(named).collect();
    all.extend([
        (USER_OBJ, class(6), UNDEFINED),
        (GROUP_OBJ, class(3), UNDEFINED),
        (MASK, mask, UNDEFINED),
        (OTHER, class(0), UNDEFINED),
    ]);
    all.sort_unstable_by_key(|(tag, _, id)| (*tag, *id));
    let mut bytes = VERSION.to_le_bytes().to_vec();
    for (tag, bits, id) in all {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(bits.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::{ATTRIBUTE, remove, set, value};
    use crate::node::{AclEntry, Who};

    /// The kernel refuses a list whose form is not its own, and gives back what it understood.
    #[test]
    fn the_kernel_takes_the_list_and_shows_its_mask_as_the_group() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "").unwrap();
        let entries = [
            AclEntry { who: Who::Group(36), bits: 4 },
            AclEntry { who: Who::User(4242), bits: 6 },
            AclEntry { who: Who::User(107), bits: 6 },
        ];
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        set(&path, 0o600, &entries).unwrap();
        let mut kept = vec![0_u8; 4096];
        let length = rustix::fs::lgetxattr(&path, ATTRIBUTE, &mut kept).unwrap();
        assert_eq!(kept[..length], value(0o600, &entries));
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o660);
        remove(&path).unwrap();
        remove(&path).unwrap();
        assert!(rustix::fs::lgetxattr(&path, ATTRIBUTE, &mut kept).is_err());
    }
}
