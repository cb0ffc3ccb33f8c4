//! Finds the pronunciation dictionary in the package of `cmudict-fast`, so that the binary can carry it.
//!
//! That crate ships its dictionary as a file beside its source and exports neither the text nor the path; Cargo knows
//! where the source lies, in a registry as in a vendored folder.

use std::env;
use std::path::PathBuf;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=Cargo.toml");
    let resources = match cmudict_package() {
        Ok(package) => package,
        Err(problem) => {
            println!("cargo::error=cannot find the dictionary of the crate cmudict-fast: {problem}");
            return;
        }
    };
    for (variable, file) in
        [("LONGSPAN_CMUDICT", "resources/cmudict.dict"), ("LONGSPAN_CMUDICT_LICENCE", "LICENSE-CMUDICT")]
    {
        let path = resources.join(file);
        if !path.is_file() {
            println!("cargo::error=the crate cmudict-fast has no file {}", path.display());
            return;
        }
        println!("cargo::rerun-if-changed={}", path.display());
        println!("cargo::rustc-env={variable}={}", path.display());
    }
}

/// The folder of the package `cmudict-fast`.
fn cmudict_package() -> Result<PathBuf, String> {
    // Offline first: a build has just fetched all that it needs, and must not need a network again. Metadata also wants
    // packages that only other members' tests use, which a first build may not have fetched; then Cargo may fetch them.
    let metadata = metadata(true).or_else(|_| metadata(false))?;
    let packages = metadata["packages"].as_array().ok_or("cargo metadata lists no packages")?;
    packages
        .iter()
        .find(|package| package["name"] == "cmudict-fast")
        .and_then(|package| package["manifest_path"].as_str())
        .and_then(|manifest| PathBuf::from(manifest).parent().map(PathBuf::from))
        .ok_or_else(|| "cargo metadata does not list it".into())
}

fn metadata(offline: bool) -> Result<serde_json::Value, String> {
    let variable = |name| env::var_os(name).ok_or(format!("Cargo does not set {name}"));
    let mut cargo = Command::new(variable("CARGO")?);
    cargo.args(["metadata", "--format-version", "1", "--filter-platform"]).arg(variable("TARGET")?);
    cargo.arg("--manifest-path").arg(PathBuf::from(variable("CARGO_MANIFEST_DIR")?).join("Cargo.toml"));
    if offline {
        cargo.arg("--offline");
    }
    let output = cargo.output().map_err(|error| format!("cannot run cargo metadata: {error}"))?;
    if !output.status.success() {
        return Err(format!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr).replace('\n', " ")));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| format!("cargo metadata gave no JSON: {error}"))
}
