//! Conditions, as `metav1.Condition` has them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Whether a condition holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum ConditionStatus {
    /// It does.
    True,
    /// It does not.
    False,
    /// Nobody can tell yet.
    #[default]
    Unknown,
}

/// One aspect of an object's state.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Which aspect, such as `Ready`.
    #[serde(rename = "type")]
    pub type_: String,
    /// Whether it holds.
    pub status: ConditionStatus,
    /// The generation of the object that this was said of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// When the status last changed, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_transition_time: Option<String>,
    /// Why, in one word for programs.
    pub reason: String,
    /// Why, for people. (An empty default would become null on its way through older kubectls.)
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

impl Condition {
    /// A condition without its time, which [`set_condition`] takes over or the writer fills in.
    #[must_use]
    pub fn new(type_: &str, holds: bool, reason: &str, message: impl Into<String>) -> Self {
        Self {
            type_: type_.to_owned(),
            status: if holds { ConditionStatus::True } else { ConditionStatus::False },
            reason: reason.to_owned(),
            message: message.into(),
            ..Self::default()
        }
    }

    /// This condition, said of that generation.
    #[must_use]
    pub fn of(mut self, generation: Option<i64>) -> Self {
        self.observed_generation = generation;
        self
    }

    /// Whether it holds.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.status == ConditionStatus::True
    }
}

/// The longest message, in characters: what objects name can be long, and many.
const MESSAGE_MAX: usize = 1000;

/// Puts `new` into `all`, in the place of the one of its type. The time stays if the status does. A
/// message without end is cut.
pub fn set_condition(all: &mut Vec<Condition>, mut new: Condition) {
    if let Some((end, _)) = new.message.char_indices().nth(MESSAGE_MAX) {
        new.message.truncate(end);
        new.message.push_str("...");
    }
    let Some(old) = all.iter_mut().find(|old| old.type_ == new.type_) else {
        all.push(new);
        return;
    };
    if old.status == new.status {
        new.last_transition_time = old.last_transition_time.take();
    }
    *old = new;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_is_that_of_the_last_change_of_status() {
        let mut all = vec![Condition {
            last_transition_time: Some("then".to_owned()),
            ..Condition::new("Ready", true, "Fine", "")
        }];
        set_condition(&mut all, Condition::new("Ready", true, "Better", ""));
        assert_eq!(all[0].last_transition_time.as_deref(), Some("then"));
        assert_eq!(all[0].reason, "Better");
        set_condition(&mut all, Condition::new("Ready", false, "Broken", "no"));
        assert_eq!(all[0].last_transition_time, None);
        set_condition(&mut all, Condition::new("Other", true, "Fine", ""));
        assert_eq!(all.len(), 2);
    }

    #[test]
    fn a_message_has_an_end() {
        let mut all = Vec::new();
        set_condition(&mut all, Condition::new("Ready", false, "Broken", "\u{e9}".repeat(1000)));
        assert_eq!(all[0].message.chars().count(), 1000);
        set_condition(&mut all, Condition::new("Ready", false, "Broken", "\u{e9}".repeat(1 << 20)));
        assert_eq!(all[0].message, "\u{e9}".repeat(1000) + "...");
    }
}
