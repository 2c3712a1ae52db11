//! A reader of GGUF files (versions 2 and 3), over a memory map. Nothing in the file is trusted: every length is checked
//! against the bytes that are there. Format: ggml's `docs/gguf.md`.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::weight::WeightType;

pub struct Gguf {
    path: PathBuf,
    map: Mmap,
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, Tensor>,
}

/// A metadata value. Arrays stay in the file until asked for: a vocabulary has 150,000 strings.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    String(String),
    Array { element: u32, len: usize, bytes: Range<usize> },
}

#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// The GGUF type number: also of types that we do not compute.
    pub ggml_type: u32,
    /// Outermost first: `[n, k]` of a matrix.
    pub shape: Vec<usize>,
    bytes: Range<usize>,
}

impl Tensor {
    /// `None` of a type that we do not compute, and of a shape that no file can hold.
    fn byte_len(&self) -> Option<usize> {
        let kind = WeightType::from_ggml(self.ggml_type)?;
        let elements = self.shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size))?;
        (elements / kind.block_len()).checked_mul(kind.block_bytes())
    }
}

/// The bytes of one tensor.
#[derive(Clone, Copy)]
pub struct Raw<'a> {
    pub kind: WeightType,
    /// Rows (1 for a vector).
    pub n: usize,
    /// Elements of a row.
    pub k: usize,
    pub bytes: &'a [u8],
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

type Parse<T> = Result<T, String>;

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Parse<&'a [u8]> {
        let end = self.at.checked_add(n).filter(|&end| end <= self.bytes.len());
        let end = end.ok_or_else(|| format!("it ends within byte {} to {}", self.at, self.at.saturating_add(n)))?;
        let slice = &self.bytes[self.at..end];
        self.at = end;
        Ok(slice)
    }

    fn u32(&mut self) -> Parse<u32> {
        Ok(u32::from_le_bytes(self.take(4)?.try_into().unwrap()))
    }

    fn u64(&mut self) -> Parse<u64> {
        Ok(u64::from_le_bytes(self.take(8)?.try_into().unwrap()))
    }

    fn len(&mut self) -> Parse<usize> {
        usize::try_from(self.u64()?).map_err(|_| "a length does not fit this machine".into())
    }

    fn string(&mut self) -> Parse<String> {
        let len = self.len()?;
        String::from_utf8(self.take(len)?.to_vec()).map_err(|_| format!("a string at byte {} is not UTF-8", self.at))
    }

    fn value(&mut self, kind: u32) -> Parse<Value> {
        Ok(match kind {
            0 => Value::Unsigned(self.take(1)?[0] as u64),
            1 => Value::Signed(self.take(1)?[0] as i8 as i64),
            2 => Value::Unsigned(u16::from_le_bytes(self.take(2)?.try_into().unwrap()) as u64),
            3 => Value::Signed(i16::from_le_bytes(self.take(2)?.try_into().unwrap()) as i64),
            4 => Value::Unsigned(self.u32()? as u64),
            5 => Value::Signed(self.u32()? as i32 as i64),
            6 => Value::Float(f32::from_bits(self.u32()?) as f64),
            7 => Value::Bool(self.take(1)?[0] != 0),
            8 => Value::String(self.string()?),
            9 => {
                let (element, len) = (self.u32()?, self.len()?);
                let start = self.at;
                match element_bytes(element) {
                    Some(n) => {
                        self.take(len.checked_mul(n).ok_or("an array is too long")?)?;
                    }
                    None if element == 8 => {
                        for _ in 0..len {
                            let len = self.len()?;
                            self.take(len)?;
                        }
                    }
                    None => return Err(format!("an array at byte {start} has elements of type {element}")),
                }
                Value::Array { element, len, bytes: start..self.at }
            }
            10 => Value::Unsigned(self.u64()?),
            11 => Value::Signed(self.u64()? as i64),
            12 => Value::Float(f64::from_bits(self.u64()?)),
            _ => return Err(format!("a value at byte {} has the unknown type {kind}", self.at)),
        })
    }
}

fn element_bytes(kind: u32) -> Option<usize> {
    Some(match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        10..=12 => 8,
        _ => return None,
    })
}

impl Gguf {
    /// Maps the file and reads its header; the weights are read when they are used.
    pub fn open(path: &Path) -> Result<Self, String> {
        let fail = |why: String| format!("{}: {why}", path.display());
        let file = File::open(path).map_err(|e| fail(e.to_string()))?;
        // SAFETY: a model file that someone else shortens while it is mapped ends this process by a signal, as with every
        // program that maps its models; it cannot break memory safety of ours otherwise, the bytes being untrusted data.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| fail(format!("it cannot be mapped: {e}")))?;
        let (metadata, tensors) = parse(&map).map_err(|why| fail(format!("not a usable GGUF file: {why}")))?;
        Ok(Gguf { path: path.to_owned(), map, metadata, tensors })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn metadata(&self) -> &BTreeMap<String, Value> {
        &self.metadata
    }

    pub fn tensors(&self) -> &BTreeMap<String, Tensor> {
        &self.tensors
    }

    pub fn str(&self, key: &str) -> Option<&str> {
        match self.metadata.get(key)? {
            Value::String(s) => Some(s),
            _ => None,
        }
    }

    pub fn usize(&self, key: &str) -> Option<usize> {
        match *self.metadata.get(key)? {
            Value::Unsigned(x) => usize::try_from(x).ok(),
            Value::Signed(x) => usize::try_from(x).ok(),
            _ => None,
        }
    }

    pub fn f64(&self, key: &str) -> Option<f64> {
        match *self.metadata.get(key)? {
            Value::Float(x) => Some(x),
            _ => None,
        }
    }

    /// An array of strings.
    pub fn strings(&self, key: &str) -> Option<Vec<String>> {
        let Value::Array { element: 8, len, bytes } = self.metadata.get(key)? else { return None };
        let mut reader = Reader { bytes: &self.map[bytes.clone()], at: 0 };
        (0..*len).map(|_| reader.string().ok()).collect()
    }

    /// An array of 32-bit integers.
    pub fn i32s(&self, key: &str) -> Option<Vec<i32>> {
        let Value::Array { element: 4 | 5, bytes, .. } = self.metadata.get(key)? else { return None };
        Some(self.map[bytes.clone()].chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect())
    }

    /// A tensor of one or two dimensions, in a type that we compute.
    pub fn raw(&self, name: &str) -> Result<Raw<'_>, String> {
        let fail = |why: String| format!("{}: tensor {name}: {why}", self.path.display());
        let tensor = self.tensors.get(name).ok_or_else(|| fail("it is missing".into()))?;
        let kind = WeightType::from_ggml(tensor.ggml_type).ok_or_else(|| {
            fail(format!(
                "its type (number {}) is not one that cob computes (F32, F16, BF16, Q4_0, Q5_0, Q8_0, Q4_K, Q5_K, Q6_K)",
                tensor.ggml_type
            ))
        })?;
        let (n, k) = match tensor.shape[..] {
            [k] => (1, k),
            [n, k] => (n, k),
            _ => return Err(fail(format!("it has the shape {:?}", tensor.shape))),
        };
        let bytes = (k % kind.block_len() == 0)
            .then(|| kind.row_bytes(k).checked_mul(n))
            .flatten()
            .filter(|&bytes| tensor.bytes.start.checked_add(bytes).is_some_and(|end| end <= self.map.len()))
            .ok_or_else(|| fail(format!("{n} rows of {k} in {} do not fit the file: is it cut off?", kind.name())))?;
        Ok(Raw { kind, n, k, bytes: &self.map[tensor.bytes.start..tensor.bytes.start + bytes] })
    }

    /// Tells the kernel that the pages of `raw` are not needed any more; they come back from the file when read.
    pub(crate) fn release(&self, raw: &Raw) {
        #[cfg(target_os = "linux")]
        {
            let offset = raw.bytes.as_ptr() as usize - self.map.as_ptr() as usize;
            // SAFETY: the map is a read-only one of a file: dropped pages are read again.
            let _ =
                unsafe { self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, offset, raw.bytes.len()) };
        }
        #[cfg(not(target_os = "linux"))]
        let _ = raw;
    }
}

type Header = (BTreeMap<String, Value>, BTreeMap<String, Tensor>);

fn parse(bytes: &[u8]) -> Parse<Header> {
    let mut r = Reader { bytes, at: 0 };
    if r.take(4)? != b"GGUF" {
        return Err("it does not begin with `GGUF`".into());
    }
    let version = r.u32()?;
    if !(2..=3).contains(&version) {
        return Err(format!("it is of version {version}; versions 2 and 3 are read"));
    }
    let (tensor_count, value_count) = (r.len()?, r.len()?);
    let mut metadata = BTreeMap::new();
    for _ in 0..value_count {
        let key = r.string()?;
        let kind = r.u32()?;
        let value = r.value(kind).map_err(|why| format!("{key}: {why}"))?;
        metadata.insert(key, value);
    }
    let mut tensors = BTreeMap::new();
    for _ in 0..tensor_count {
        let name = r.string()?;
        let dims = r.u32()?;
        if dims == 0 || dims > 4 {
            return Err(format!("tensor {name} has {dims} dimensions"));
        }
        let mut shape = (0..dims).map(|_| r.len()).collect::<Parse<Vec<_>>>()?;
        shape.reverse();
        let (ggml_type, offset) = (r.u32()?, r.len()?);
        if tensors.contains_key(&name) {
            return Err(format!("tensor {name} is there twice"));
        }
        tensors.insert(name, Tensor { ggml_type, shape, bytes: offset..offset });
    }
    let alignment = match metadata.get("general.alignment") {
        None => 32,
        Some(Value::Unsigned(a)) if *a > 0 && a.is_power_of_two() && *a <= 1 << 20 => *a as usize,
        Some(other) => return Err(format!("general.alignment is {other:?}")),
    };
    let data = r.at.next_multiple_of(alignment);
    for (name, tensor) in &mut tensors {
        let offset = tensor.bytes.start;
        if !offset.is_multiple_of(alignment) {
            return Err(format!(
                "tensor {name} begins at {offset}, which is no multiple of {alignment}: it is damaged"
            ));
        }
        let start = data.checked_add(tensor.bytes.start).filter(|&start| start <= bytes.len());
        let start = start.ok_or_else(|| format!("tensor {name} lies past the end: the file is cut off"))?;
        tensor.bytes = start..start;
    }
    overlap(&tensors).map(|()| (metadata, tensors))
}

/// Refuses tensors that share bytes. Of a type that we do not know, only the start counts.
fn overlap(tensors: &BTreeMap<String, Tensor>) -> Parse<()> {
    let mut in_order: Vec<(usize, usize, &str)> = tensors
        .iter()
        .map(|(name, tensor)| (tensor.bytes.start, tensor.byte_len().unwrap_or(1), name.as_str()))
        .collect();
    in_order.sort_unstable();
    for pair in in_order.windows(2) {
        let ((start, len, name), (next_start, _, next)) = (pair[0], pair[1]);
        if start.saturating_add(len) > next_start {
            return Err(format!("the tensors {name} and {next} overlap: it is damaged"));
        }
    }
    Ok(())
}
