//! `docs/API.md`: every field of every kind, as the definitions say.
//!
//! It is made from the same schemas as `manifests/crds`, so what a reader finds is what a server
//! checks. `cargo xtask crds` writes it.

use std::fmt::Write as _;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::Value;

use crate::crd::{self, CrdError};

const HEAD: &str = "<!-- Generated from controller/api by `cargo xtask crds`: change it there. -->

# The cluster's objects, field by field

Group `vhost-rdma.io`, version `v1alpha1`. What they are for and how they work together:
[CONTROLLER.md](CONTROLLER.md). A field with `[]` is of each item of a list, one with `{}` of each
value of a map. A field in bold must be there, where what it is in is.
";

/// The text.
///
/// # Errors
/// The serializer's own.
pub fn markdown() -> Result<String, CrdError> {
    let mut text = HEAD.to_owned();
    for crd in crd::all()? {
        kind(&crd, &mut text)?;
    }
    Ok(text)
}

fn kind(crd: &CustomResourceDefinition, text: &mut String) -> Result<(), CrdError> {
    let value = serde_json::to_value(crd)?;
    let names = &crd.spec.names;
    let root = value.pointer("/spec/versions/0/schema/openAPIV3Schema").unwrap_or(&Value::Null);
    let short = names.short_names.iter().flatten().cloned().collect::<Vec<_>>().join("`, `");
    let _ = write!(
        text,
        "\n## {}\n\n{} Short name `{short}`; {}.\n",
        names.kind,
        described(root),
        if crd.spec.scope == "Namespaced" { "of a namespace" } else { "of the cluster" },
    );
    for part in ["spec", "status"] {
        let Some(schema) = root.pointer(&format!("/properties/{part}")) else { continue };
        let mut rows = Vec::new();
        fields(schema, "", &mut rows);
        let _ = write!(
            text,
            "\n### {}.{part}\n\n| field | type | meaning |\n|---|---|---|\n",
            names.kind
        );
        for row in rows {
            text.push_str(&row);
        }
        let rules = [Some(schema), (part == "spec").then_some(root)];
        for rule in rules.into_iter().flatten().flat_map(rules_of) {
            let _ = write!(text, "\nRule: {rule}.\n");
        }
    }
    Ok(())
}

fn rules_of(schema: &Value) -> Vec<String> {
    let rules = schema.get("x-kubernetes-validations").and_then(Value::as_array);
    let messages = rules.into_iter().flatten().filter_map(|rule| rule.get("message")?.as_str());
    messages.map(str::to_owned).collect()
}

fn described(schema: &Value) -> String {
    let text = schema.get("description").and_then(Value::as_str).unwrap_or_default();
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

/// One row for each field under `schema`, whose own name is `path`.
fn fields(schema: &Value, path: &str, rows: &mut Vec<String>) {
    let required = schema.get("required").and_then(Value::as_array);
    let properties = schema.get("properties").and_then(Value::as_object);
    for (name, field) in properties.into_iter().flatten() {
        let must = required.is_some_and(|all| all.iter().any(|one| one.as_str() == Some(name)));
        let at = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        let shown = if must { format!("**`{at}`**") } else { format!("`{at}`") };
        rows.push(format!("| {shown} | {} | {} |\n", kind_of(field), described(field)));
        let (inner, mark) = inside(field);
        fields(inner, &format!("{at}{mark}"), rows);
    }
}

/// What the fields below a field are fields of, and how its path says so.
fn inside(field: &Value) -> (&Value, &'static str) {
    if let Some(items) = field.get("items") {
        return (items, "[]");
    }
    match field.get("additionalProperties") {
        Some(values) if values.is_object() => (values, "{}"),
        _ => (field, ""),
    }
}

/// A field's type, what bounds it, and what it is when nobody says.
fn kind_of(field: &Value) -> String {
    let mut said = vec![type_of(field)];
    let mut bound = |key: &str, words: &str| {
        if let Some(value) = field.get(key).filter(|value| !value.is_null()) {
            said.push(format!("{words} {}", number(value)));
        }
    };
    bound("minimum", "from");
    bound("maximum", "to");
    bound("minItems", "at least");
    bound("maxItems", "at most");
    bound("maxLength", "at most");
    bound("default", "default");
    said.join(", ")
}

fn type_of(field: &Value) -> String {
    let text = |key: &str| field.get(key).and_then(Value::as_str);
    if let Some(choices) = field.get("enum").and_then(Value::as_array) {
        let choices = choices.iter().filter(|choice| !choice.is_null()).map(number);
        return choices.collect::<Vec<_>>().join(", ");
    }
    if field.get("x-kubernetes-int-or-string") == Some(&true.into()) {
        return "quantity".to_owned();
    }
    if let Some(items) = field.get("items") {
        return format!("list of {}", type_of(items));
    }
    match (text("type"), text("pattern")) {
        // Longer than what it says.
        (Some(_), Some(crate::cidr::PATTERN)) => "range such as `10.0.0.0/16`".to_owned(),
        (Some(kind), Some(pattern)) => format!("{kind} `{}`", pattern.replace('|', "\\|")),
        (Some("object"), None) if field.get("additionalProperties").is_some() => "map".to_owned(),
        (kind, _) => kind.unwrap_or("any").to_owned(),
    }
}

/// A value as one writes it: whole numbers are said as such.
fn number(value: &Value) -> String {
    match value {
        Value::Number(n) => n.to_string().trim_end_matches(".0").to_owned(),
        Value::String(text) => format!("`{text}`"),
        other => format!("`{other}`"),
    }
}
