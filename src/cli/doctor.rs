//! `cob doctor`: what this machine and this build can do, and where things lie.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use super::setup::Fault;
use super::{pretty, show};
use crate::config::Config;
use crate::hub::{self, Hub, HubSettings, human_bytes};
use crate::model::Backend;

#[derive(Args)]
pub struct DoctorArgs {
    /// One object on standard output
    #[arg(long)]
    json: bool,
    /// Do not ask the hub whether it can be reached
    #[arg(long)]
    offline: bool,
}

pub fn run(args: DoctorArgs) -> u8 {
    let found = examine(&args);
    let config_fault = found.as_ref().is_ok_and(|found| found["config"]["fault"].is_string());
    let code = show(found.map(|found| if args.json { pretty(&found) } else { table(&found) }));
    // No command that wants a model would run.
    if code == 0 && config_fault { 1 } else { code }
}

fn examine(args: &DoctorArgs) -> Result<Value, Fault> {
    let settings = HubSettings::from_env()?;
    let folders = &settings.folders;
    let place = |path: &Path| json!({"path": path.display().to_string(), "state": state(path)});
    let config = Config::load();
    let endpoint = settings.endpoint.clone();
    let offline = args.offline || settings.offline;
    let places = json!({
        "models": place(&folders.models),
        "kv": place(&folders.kv),
        "sessions": place(&folders.sessions),
    });
    let hub = Hub::new(settings.clone());
    let models =
        hub.manifests().iter().filter(|manifest| hub.is_installed(manifest)).map(|manifest| manifest.id.as_str());
    Ok(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "cpu": {
            "cores": std::thread::available_parallelism().map_or(1, usize::from),
            "kernels": Backend::cpu().name(),
            "features": cpu_features(),
        },
        "gpu": gpu(),
        "memory": {"available_bytes": hub::available_bytes()},
        "folders": places,
        "config": match config {
            Ok(config) => json!({"model": config.model}),
            Err(why) => json!({"fault": why}),
        },
        "models": models.collect::<Vec<_>>(),
        "hub": {"endpoint": endpoint, "state": if offline { "offline".into() } else { reach(&endpoint) }},
    }))
}

fn state(path: &Path) -> &'static str {
    match std::fs::metadata(path) {
        Err(_) => "not there yet; made when it is needed",
        Ok(meta) if !meta.is_dir() => "not a folder",
        Ok(_) if tempfile::tempfile_in(path).is_err() => "cannot be written",
        Ok(_) => "ok",
    }
}

/// The features of the CPU that kernels are chosen by.
fn cpu_features() -> Vec<&'static str> {
    #[allow(unused_mut)]
    let mut found = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! probe {
            ($($name:tt)*) => { $(if std::arch::is_x86_feature_detected!($name) { found.push($name); })* };
        }
        probe!("avx" "f16c" "fma" "avx2" "avxvnni" "avx512f" "avx512bw" "avx512vl" "avx512vnni");
    }
    #[cfg(target_arch = "aarch64")]
    {
        macro_rules! probe {
            ($($name:tt)*) => { $(if std::arch::is_aarch64_feature_detected!($name) { found.push($name); })* };
        }
        probe!("neon" "fp16" "dotprod" "i8mm");
    }
    found
}

fn gpu() -> Value {
    let device = ["/dev/nvidia0", "/dev/dxg"].into_iter().find(|path| Path::new(path).exists());
    let state = match (cfg!(feature = "cuda"), device, cfg!(feature = "metal")) {
        (true, Some(_), _) => "CUDA is built in and a device is there",
        (true, None, _) => "CUDA is built in, but no device is there",
        (false, Some(_), _) => "a device is there, but this build has no CUDA; build with --features cuda",
        (false, None, true) => "Metal is built in",
        (false, None, false) => "none; the CPU computes",
    };
    json!({"cuda": cfg!(feature = "cuda"), "metal": cfg!(feature = "metal"), "device": device, "state": state})
}

/// Whether the hub answers at all; what it answers does not matter.
fn reach(endpoint: &str) -> String {
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .timeout_global(Some(Duration::from_secs(5)))
        .http_status_as_error(false)
        .build()
        .into();
    match agent.head(endpoint).call() {
        Ok(_) => "answers".into(),
        Err(error) => format!("cannot be reached: {error}"),
    }
}

fn table(found: &Value) -> String {
    let mut text = format!("cob       {}\n", found["version"].as_str().unwrap_or_default());
    let features: Vec<&str> =
        found["cpu"]["features"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let kernels = found["cpu"]["kernels"].as_str().unwrap_or_default();
    let _ = writeln!(text, "cpu       {} cores, kernels {kernels} (of {})", found["cpu"]["cores"], features.join(" "));
    let _ = writeln!(text, "gpu       {}", found["gpu"]["state"].as_str().unwrap_or_default());
    let memory = found["memory"]["available_bytes"].as_u64().map_or("unknown".into(), human_bytes);
    let _ = writeln!(text, "memory    {memory} free");
    for (name, place) in found["folders"].as_object().into_iter().flatten() {
        let (path, state) = (place["path"].as_str().unwrap_or_default(), place["state"].as_str().unwrap_or_default());
        let _ = writeln!(text, "{name:<9} {path} ({state})");
    }
    let config = match (&found["config"]["fault"], &found["config"]["model"]) {
        (Value::String(fault), _) => format!("cannot be used: {fault}"),
        (_, Value::String(model)) => format!("model {model}"),
        _ => "nothing set".into(),
    };
    let _ = writeln!(text, "config    {config}");
    let models: Vec<&str> = found["models"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let models = if models.is_empty() { "none; `cob model pull` fetches one".into() } else { models.join(", ") };
    let _ = writeln!(text, "installed {models}");
    let hub = &found["hub"];
    let (endpoint, state) = (hub["endpoint"].as_str().unwrap_or_default(), hub["state"].as_str().unwrap_or_default());
    let _ = writeln!(text, "hub       {endpoint} ({state})");
    text
}
