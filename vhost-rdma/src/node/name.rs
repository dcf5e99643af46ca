//! Names of networks and NICs: they become directory names, metric labels and VMM options, so their
//! alphabet is small.

use super::Error;

/// The longest name in bytes.
const NAME_MAX: usize = 63;

/// Checks `[a-z0-9][a-z0-9._-]{0,62}`; `what` ("NIC", "network") goes into the message.
///
/// # Errors
/// [`Error::BadName`] says which rule is broken.
pub fn check_name(what: &'static str, name: &str) -> Result<(), Error> {
    let bad = |why: &'static str| Err(Error::BadName { what, name: name.to_owned(), why });
    if name.is_empty() {
        return bad("it is empty");
    }
    if name.len() > NAME_MAX {
        return bad("it is longer than 63 characters");
    }
    if !name.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit()) {
        return bad("it must begin with a-z or 0-9");
    }
    if !name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b".-_".contains(&b)) {
        return bad("only a-z, 0-9, '.', '_' and '-' are allowed");
    }
    Ok(())
}

/// The known names that a mistyped one probably meant, best first, at most three.
#[must_use]
pub fn near<'a>(wrong: &str, known: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut scored: Vec<(f64, &str)> = known
        .map(|name| {
            let score = strsim::jaro_winkler(wrong, name);
            // A part of the name ("web" for "web-1") is a common short cut that edit distance ranks
            // low.
            let part = !wrong.is_empty() && (name.contains(wrong) || wrong.contains(name));
            (if part { score.max(0.9) } else { score }, name)
        })
        .filter(|(score, _)| *score > 0.8)
        .collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    scored.into_iter().take(3).map(|(_, name)| name.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

    use super::{check_name, near};

    #[test]
    fn the_limits_of_length() {
        assert!(check_name("NIC", &"a".repeat(63)).is_ok());
        assert!(check_name("NIC", &"a".repeat(64)).is_err());
        assert!(check_name("NIC", "").is_err());
    }

    #[test]
    fn names_that_would_escape_a_directory_or_an_option_are_refused() {
        for name in [".", "..", "-a", "_a", "a/b", "a b", "a,b", "A", "é", "a\n"] {
            assert!(check_name("NIC", name).is_err(), "{name:?} was taken");
        }
    }

    #[test]
    fn near_names_come_best_first() {
        let known = ["web-1", "web-2", "db"];
        assert_eq!(near("wep-1", known.into_iter()).first().map(String::as_str), Some("web-1"));
        assert_eq!(near("web", known.into_iter()).len(), 2);
        assert!(near("zzzz", known.into_iter()).is_empty());
    }

    proptest! {
        #[test]
        fn the_rule_is_the_documented_expression(name in "[a-zA-Z0-9._/ -]{0,66}") {
            let mut chars = name.chars();
            let first = chars.next().is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
            let rest =
                chars.all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "._-".contains(c));
            prop_assert_eq!(check_name("NIC", &name).is_ok(), first && rest && name.len() <= 63);
        }

        #[test]
        fn at_most_three_are_offered(
            wrong in ".{0,8}",
            known in proptest::collection::vec("[a-z]{1,8}", 0..12)
        ) {
            prop_assert!(near(&wrong, known.iter().map(String::as_str)).len() <= 3);
        }
    }
}
