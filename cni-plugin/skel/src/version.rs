//! Versions of the CNI specification. They are not those of any library or plugin.

use std::fmt;
use std::str::FromStr;

/// A released version of the CNI specification that this crate speaks.
///
/// 0.1.0 and 0.2.0 are left out: their result (`ip4`, `ip6`) can carry neither interfaces nor a
/// chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    /// 0.3.0: results with interfaces, chains.
    V0_3_0,
    /// 0.3.1: as 0.3.0.
    V0_3_1,
    /// 0.4.0: CHECK, `prevResult` for DEL.
    V0_4_0,
    /// 1.0.0: the version of an address is no longer said.
    V1_0_0,
    /// 1.1.0: GC, STATUS, more about interfaces and routes.
    V1_1_0,
}

impl Version {
    /// All of them, oldest first.
    pub const ALL: &'static [Self] =
        &[Self::V0_3_0, Self::V0_3_1, Self::V0_4_0, Self::V1_0_0, Self::V1_1_0];

    /// The newest one.
    pub const NEWEST: Self = Self::V1_1_0;

    /// As it stands in `cniVersion`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::V0_3_0 => "0.3.0",
            Self::V0_3_1 => "0.3.1",
            Self::V0_4_0 => "0.4.0",
            Self::V1_0_0 => "1.0.0",
            Self::V1_1_0 => "1.1.0",
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Version {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.iter().copied().find(|version| version.as_str() == text).ok_or(())
    }
}
