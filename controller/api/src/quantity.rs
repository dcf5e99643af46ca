//! A number of bytes, or of bits per second, as Kubernetes writes numbers: `1073741824`, `1Gi`,
//! `100G`.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// What the schema lets through. Nothing of it is 2⁶³ or more, which nobody could read;
/// [`Quantity::from_str`] takes a few more.
const PATTERN: &str = "^([0-9]{1,18}|[0-9]{1,15}(k|Ki)|[0-9]{1,12}Mi?|[0-9]{1,9}Gi?|\
                       [0-9]{1,6}Ti?|[0-9]{1,3}Pi?|[0-7]Ei?)$";

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
/// Integers of the API are signed, so the largest is 2⁶³ − 1. An object may have been stored when
/// its schema did not say so, and one that cannot be read keeps all of its kind from being watched:
/// what is beyond an end is read as that end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Quantity(pub u64);

/// The largest.
const MOST: Quantity = Quantity(i64::MAX.cast_unsigned());

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
                Ok(Quantity::new(number).unwrap_or(MOST))
            }

            fn visit_i64<E: Error>(self, number: i64) -> Result<Quantity, E> {
                Ok(u64::try_from(number).map_or(Quantity(0), Quantity))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Quantity, E> {
                let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
                let unit = text.strip_prefix(digits).unwrap_or_default();
                let is_unit = unit.is_empty() || SUFFIXES.iter().any(|(known, _)| *known == unit);
                let is_number = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
                match text.parse() {
                    Err(_) if is_number && is_unit => Ok(MOST),
                    read => read.map_err(E::custom),
                }
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
        json_schema!({ "x-kubernetes-int-or-string": true, "pattern": PATTERN, "minimum": 0 })
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
        for no_number in ["\"\"", "\"Gi\"", "\"-1\"", "\"1.5Gi\"", "\"1gi\"", "true", "[]"] {
            assert!(serde_json::from_str::<Quantity>(no_number).is_err(), "{no_number}");
        }
        assert_eq!(serde_json::to_string(&Quantity(1024)).unwrap(), "1024");
    }

    #[test]
    fn what_is_beyond_an_end_is_read_as_that_end() {
        let read = |json: &str| serde_json::from_str::<Quantity>(json).unwrap();
        assert_eq!(read("-7"), Quantity(0));
        for most in
            ["9223372036854775808", "\"9999999999999999999\"", "\"9Ei\"", "\"99999999999Ti\""]
        {
            assert_eq!(read(most), MOST, "{most}");
        }
    }
}
