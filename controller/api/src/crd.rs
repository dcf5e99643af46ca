//! The definitions of all kinds, as manifests.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt as _;
use serde_json::Value;

use crate::{
    RdmaIPBlock, RdmaNetwork, RdmaNic, RdmaNicClass, RdmaNode, RdmaNodePolicy, RdmaTenant,
};

const HEADER: &str = "# Generated from controller/api by `cargo xtask crds`: change it there.\n";

/// Why a definition cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum CrdError {
    /// It is not JSON.
    #[error("cannot represent a definition: {0}")]
    Json(#[from] serde_json::Error),
    /// It is not YAML.
    #[error("cannot write a definition: {0}")]
    Yaml(String),
}

/// All definitions.
///
/// # Errors
/// The serializer's own.
pub fn all() -> Result<Vec<CustomResourceDefinition>, CrdError> {
    let derived = [
        RdmaTenant::crd(),
        RdmaNetwork::crd(),
        RdmaNicClass::crd(),
        RdmaNodePolicy::crd(),
        RdmaNode::crd(),
        RdmaIPBlock::crd(),
        RdmaNic::crd(),
    ];
    let bounded = |crd: CustomResourceDefinition| {
        let mut value = serde_json::to_value(crd)?;
        bound_numbers(&mut value);
        Ok(serde_json::from_value(value)?)
    };
    derived.into_iter().map(bounded).collect()
}

/// API servers do not know these formats: without a maximum they store numbers that nobody can
/// read, and then nobody can watch the kind (apiextensions-apiserver, `supportedFormats`).
fn bound_numbers(value: &mut Value) {
    match value {
        Value::Object(map) => {
            let most = match map.get("format").and_then(Value::as_str) {
                Some("uint8") => Some(u32::from(u8::MAX)),
                Some("uint16") => Some(u32::from(u16::MAX)),
                Some("uint32") => Some(u32::MAX),
                _ => None,
            };
            if let Some(most) = most.filter(|_| !map.contains_key("maximum")) {
                map.insert("maximum".to_owned(), f64::from(most).into());
            }
            map.values_mut().for_each(bound_numbers);
        }
        Value::Array(all) => all.iter_mut().for_each(bound_numbers),
        _ => {}
    }
}

/// The definition as a manifest; without its CEL rules for a server before 1.25.
///
/// # Errors
/// The serializers' own.
pub fn manifest(crd: &CustomResourceDefinition, cel: bool) -> Result<String, CrdError> {
    let mut value = serde_json::to_value(crd)?;
    if !cel {
        without_rules(&mut value);
    }
    let body = serde_saphyr::to_string(&value).map_err(|e| CrdError::Yaml(e.to_string()))?;
    Ok(format!("{HEADER}{body}"))
}

fn without_rules(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.remove("x-kubernetes-validations");
            map.values_mut().for_each(without_rules);
        }
        Value::Array(all) => all.iter_mut().for_each(without_rules),
        _ => {}
    }
}

/// Every file of `manifests/crds`: path under it, text.
///
/// # Errors
/// The serializers' own.
pub fn files() -> Result<Vec<(String, String)>, CrdError> {
    let mut files = Vec::new();
    for (dir, cel) in [("base", true), ("no-cel", false)] {
        let mut list = String::new();
        for crd in all()? {
            let name = format!("{}.yaml", crd.spec.names.plural);
            list += &format!("  - {name}\n");
            files.push((format!("{dir}/{name}"), manifest(&crd, cel)?));
        }
        let head = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources:\n";
        files.push((format!("{dir}/kustomization.yaml"), format!("{HEADER}{head}{list}")));
    }
    Ok(files)
}
