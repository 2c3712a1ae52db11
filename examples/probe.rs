use cob::model::*;
fn cpu_s() -> (f64, f64) { let s = std::fs::read_to_string("/proc/self/stat").unwrap(); let f: Vec<&str> = s.rsplit(')').next().unwrap().split_whitespace().collect(); (f[11].parse::<f64>().unwrap() / 100.0, f[12].parse::<f64>().unwrap() / 100.0) }
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let threads: usize = a[2].parse().unwrap();
    let n: usize = a[3].parse().unwrap();
    let t = std::time::Instant::now();
    let mut m = Model::open(a[1].as_ref(), Backend::Cpu { tier: Tier::detect(), threads }, KvType::F16).unwrap();
    println!("load {:?} cpu {:?}", t.elapsed(), cpu_s());
    let ids: Vec<u32> = (0..n).map(|i| ((i * 7919 + 13) % 150000) as u32).collect();
    for _ in 0..3 {
        let mut kv = m.new_kv();
        let t = std::time::Instant::now();
        let mut l = vec![];
        for c in ids.chunks(256) { l = m.forward(&mut kv, c, Logits::Last, &|| false).unwrap(); }
        let e = t.elapsed().as_secs_f64(); println!("cpu {:?}", cpu_s());
        println!("prefill {n}: {:.1} tok/s  l0={:?}", n as f64 / e, &l[..3]);
        let t = std::time::Instant::now();
        for i in 0..32 { l = m.forward(&mut kv, &[i * 77], Logits::Last, &|| false).unwrap(); }
        println!("decode: {:.1} tok/s {:?}", 32.0 / t.elapsed().as_secs_f64(), &l[..3]);
    }
    let s = std::fs::read_to_string("/proc/self/status").unwrap();
    println!("{}", s.lines().find(|l| l.starts_with("VmHWM")).unwrap());
}
