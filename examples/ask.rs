use cob::chat::qwen::*; use cob::chat::*; use cob::message::*; use cob::model::*;
#[tokio::main]
async fn main() {
    let a: Vec<String> = std::env::args().collect();
    let q = Qwen::open(a[1].as_ref(), Options { backend: Backend::cpu(), kv_type: KvType::F16, context_tokens: 8192, cache_bytes: 1 << 30, id: "x".into(), digest: String::new() }).unwrap();
    let tools: Vec<ToolSpec> = vec![
        ToolSpec { name: "Read".into(), description: "Reads a file.".into(), parameters: serde_json::json!({"type":"object","properties":{"file_path":{"type":"string"}},"required":["file_path"],"additionalProperties":false}) },
        ToolSpec { name: "Bash".into(), description: "Runs a shell command.".into(), parameters: serde_json::json!({"type":"object","properties":{"command":{"type":"string"}},"required":["command"],"additionalProperties":false}) },
    ];
    for _ in 0..2 {
    let r = q.complete(CompletionRequest { messages: vec![Message::User { text: a[2].clone() }], tools: tools.clone(), tool_choice: ToolChoice::Auto, sampling: Sampling::default(), max_output_tokens: 200, rescue: true, cancel: Default::default() }, &mut |d| println!("{d:?}")).await;
    println!("{r:#?}");
    }
}
