//! Label selectors, as `metav1.LabelSelector` has them, with their meaning.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How a requirement compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Operator {
    /// The label is there, with one of the values.
    In,
    /// The label is not there, or has none of the values.
    NotIn,
    /// The label is there.
    Exists,
    /// The label is not there.
    DoesNotExist,
}

/// One requirement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Requirement {
    /// The label.
    #[schemars(length(min = 1, max = 317))]
    pub key: String,
    /// How it is compared.
    pub operator: Operator,
    /// With what; for `In` and `NotIn`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub values: Vec<String>,
}

/// A set of objects by their labels. An empty one selects everything.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LabelSelector {
    /// Labels with exactly these values.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub match_labels: BTreeMap<String, String>,
    /// Requirements that all must hold.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub match_expressions: Vec<Requirement>,
}

impl LabelSelector {
    /// Whether it selects an object with these labels.
    #[must_use]
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.match_labels.iter().all(|(key, value)| labels.get(key) == Some(value))
            && self.match_expressions.iter().all(|requirement| requirement.holds(labels))
    }
}

impl Requirement {
    fn holds(&self, labels: &BTreeMap<String, String>) -> bool {
        let value = labels.get(&self.key);
        let listed = value.is_some_and(|value| self.values.contains(value));
        match self.operator {
            Operator::In => listed,
            Operator::NotIn => !listed,
            Operator::Exists => value.is_some(),
            Operator::DoesNotExist => value.is_none(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    fn requires(operator: Operator, values: &[&str]) -> LabelSelector {
        LabelSelector {
            match_expressions: vec![Requirement {
                key: "team".to_owned(),
                operator,
                values: values.iter().map(|v| (*v).to_owned()).collect(),
            }],
            ..LabelSelector::default()
        }
    }

    #[test]
    fn operators_mean_what_kubernetes_says() {
        let red = labels(&[("team", "red")]);
        let none = labels(&[]);
        for (operator, values, of_red, of_none) in [
            (Operator::In, &["red", "blue"][..], true, false),
            (Operator::In, &["blue"][..], false, false),
            (Operator::NotIn, &["red"][..], false, true),
            (Operator::Exists, &[][..], true, false),
            (Operator::DoesNotExist, &[][..], false, true),
        ] {
            let selector = requires(operator, values);
            assert_eq!(selector.matches(&red), of_red, "{selector:?}");
            assert_eq!(selector.matches(&none), of_none, "{selector:?}");
        }
        assert!(LabelSelector::default().matches(&none));
    }
}
