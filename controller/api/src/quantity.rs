//! A number of bytes, or of bits per second, as Kubernetes writes numbers: `1073741824`, `1Gi`,
//! `100G`.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// What the schema lets through; [`Quantity::from_str`] takes the same.
const PATTERN: &str = "^[0-9]{1,19}([kMGTPE]|[KMGTPE]i)?$";

/// Decimal and binary suffixes of the API's quantities.
const SUFFIXES: [(&str, u64); 12] = [
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("Pi", 1 << 50),
    ("Ei", 1 << 60),
    ("k", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
    ("P", 1_000_000_000_000_000),
    ("E", 1_000_000_000_000_000_000),
];

/// A whole number that may carry a suffix. Written back as a plain number.
///
/// Integers of the API are signed, so the largest is 2⁶³ − 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Quantity(pub u64);

/// A text that is no [`Quantity`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a whole number below 8Ei, such as 1073741824, 1Gi or 100G (k M G T P E, Ki Mi Gi \
     …)"
)]
pub struct QuantityError(String);

impl FromStr for Quantity {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        let bad = || QuantityError(text.chars().take(64).collect());
        let (digits, unit) = SUFFIXES
            .iter()
            .find_map(|(suffix, unit)| Some((text.strip_suffix(suffix)?, *unit)))
            .unwrap_or((text, 1));
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return Err(bad());
        }
        let number: u64 = digits.parse().map_err(|_| bad())?;
        number.checked_mul(unit).and_then(Self::new).ok_or_else(bad)
    }
}

impl Quantity {
    /// The number, if the API can say it.
    #[must_use]
    pub fn new(number: u64) -> Option<Self> {
        i64::try_from(number).ok().map(|_| Self(number))
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Serialize for Quantity {
    fn serialize<S: Serializer>(&self, output: S) -> Result<S::Ok, S::Error> {
        output.serialize_u64(self.0)
    }
}

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        struct Either;
        impl Visitor<'_> for Either {
            type Value = Quantity;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number, or one with a suffix such as \"1Gi\"")
            }

            fn visit_u64<E: Error>(self, number: u64) -> Result<Quantity, E> {
                Quantity::new(number)
                    .ok_or_else(|| E::invalid_value(Unexpected::Unsigned(number), &self))
            }

            fn visit_i64<E: Error>(self, number: i64) -> Result<Quantity, E> {
                u64::try_from(number)
                    .map(Quantity)
                    .map_err(|_| E::invalid_value(Unexpected::Signed(number), &self))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Quantity, E> {
                text.parse().map_err(E::custom)
            }
        }
        input.deserialize_any(Either)
    }
}

impl JsonSchema for Quantity {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Quantity".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "x-kubernetes-int-or-string": true, "pattern": PATTERN })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes_are_those_of_the_api() {
        for (text, number) in [
            ("0", 0),
            ("12", 12),
            ("1k", 1000),
            ("1Ki", 1024),
            ("4Gi", 4 << 30),
            ("100G", 100_000_000_000),
            ("7Ei", 7 << 60),
        ] {
            assert_eq!(text.parse(), Ok(Quantity(number)), "{text}");
        }
    }

    #[test]
    fn what_is_no_number_is_refused_by_name() {
        for text in ["", "Gi", "-1", "1.5Gi", "1 Gi", "8Ei", "1gi", "99999999999999999999", "1Kii"]
        {
            let error = text.parse::<Quantity>().unwrap_err();
            assert!(error.to_string().contains(&format!("{text:?}")), "{error}");
        }
    }

    #[test]
    fn json_has_both_forms() {
        assert_eq!(serde_json::from_str::<Quantity>("\"1Ki\"").unwrap(), Quantity(1024));
        assert_eq!(serde_json::from_str::<Quantity>("7").unwrap(), Quantity(7));
        assert!(serde_json::from_str::<Quantity>("-7").is_err());
        assert!(serde_json::from_str::<Quantity>("9223372036854775808").is_err());
        assert_eq!(serde_json::to_string(&Quantity(1024)).unwrap(), "1024");
    }
}
