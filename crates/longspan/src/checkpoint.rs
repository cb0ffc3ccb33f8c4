//! Weights and training states on disk.
//!
//! Every file is written under a temporary name in the same folder (`.NAME.tmp`), flushed to the disk and then renamed
//! over the old one: even after a power cut either the old file or the new one is complete.
//!
//! **Weights** ([`save_weights`]) are a plain [safetensors](https://github.com/huggingface/safetensors) file, one
//! tensor a parameter, named by its place in the model: `encoder.0.attention.query_key_value.weight`,
//! `encoder.0.attention.attention.relative`, `decoder.1.cross_attention.output.bias`, `output.weight`. A linear layer's
//! weight is `[input, output]` and multiplies from the right. Any safetensors reader opens it, from Python
//! `safetensors.numpy.load_file`.
//!
//! **Training states** ([`save_training`]) are one safetensors file as well: the weights as `model.NAME`, the
//! optimizer's record as the bytes `optimizer`, and a caller's own progress. One file, so that weights and moments
//! never come from different steps.
//!
//! Both carry a checksum in their metadata under `longspan`. Files from elsewhere need not have it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::Path;

use burn::module::Module;
#[cfg(feature = "autodiff")]
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bytes, DType, TensorData};
use burn_store::burn_pack::Tensor as PackTensor;
pub use burn_store::{ApplyResult, KeyRemapper};
use burn_store::{ModuleAdapter, ModuleSnapshot, PyTorchToBurnAdapter, bridge};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The key of this crate's entry in a file's metadata: [`Footnote`] as JSON. One entry, because
/// safetensors does not keep the order of entries.
const METADATA: &str = "longspan";

/// The metadata that this crate adds to a file.
#[derive(Debug, Serialize, Deserialize)]
struct Footnote {
    /// The [`checksum`] of all tensors, in hexadecimal.
    checksum: String,
    /// The parameter ids that the optimizer's record uses.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    parameters: BTreeMap<String, u64>,
    /// The caller's own progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    progress: Option<serde_json::Value>,
}

/// Writes the weights of `model` to `path`: its parameters, buffers of integers and of truth values among them.
///
/// # Errors
/// A device that gives no numbers back, a number type that safetensors has no name for, and what
/// [`write_atomically`] cannot do.
pub fn save_weights<M: Module>(path: impl AsRef<Path>, model: &M) -> Result<()> {
    let path = path.as_ref();
    write_atomically(path, &weights_to_bytes(path, model)?)
}

/// What [`save_weights`] writes; `path` is the file that errors name.
///
/// # Errors
/// As [`save_weights`], but for those of the disk.
pub fn weights_to_bytes<M: Module>(path: impl AsRef<Path>, model: &M) -> Result<Vec<u8>> {
    serialized(path.as_ref(), collected(model, path.as_ref())?.0, BTreeMap::new(), None)
}

/// Reads the weights at `path` into `model`, which must have the same parameters.
///
/// # Errors
/// A file that cannot be read or is no whole safetensors file, that lacks a parameter or has one too many, with a wrong
/// shape or number type, or whose checksum does not match. `model` is then dropped.
pub fn load_weights<M: Module>(path: impl AsRef<Path>, model: M) -> Result<M> {
    let path = path.as_ref();
    let bytes = read(path)?;
    let (tensors, footnote) = parse(path, &bytes)?;
    restore(path, tensors.iter().collect(), &BTreeMap::new(), footnote.is_some(), model)
}

/// Writes all that [`load_training`] needs to go on as if nothing had happened: weights, the optimizer's moments, the
/// caller's `progress`, and tensors of the caller's `own`, such as the states that a language model has carried so far.
///
/// # Errors
/// As [`save_weights`]; a record or progress that cannot be serialised.
#[cfg(feature = "autodiff")]
pub fn save_training<M: Module>(
    path: impl AsRef<Path>,
    model: &M,
    optimizer: &ModuleOptimizer,
    progress: &impl Serialize,
    own: Vec<TensorData>,
) -> Result<()> {
    let path = path.as_ref();
    write_atomically(path, &training_to_bytes(path, model, optimizer, progress, own)?)
}

/// What [`save_training`] writes; `path` is the file that errors name.
///
/// # Errors
/// As [`save_training`], but for those of the disk.
#[cfg(feature = "autodiff")]
pub fn training_to_bytes<M: Module>(
    path: impl AsRef<Path>,
    model: &M,
    optimizer: &ModuleOptimizer,
    progress: &impl Serialize,
    own: Vec<TensorData>,
) -> Result<Vec<u8>> {
    let path = path.as_ref();
    let broken = |problem| checkpoint(path, problem, BUG);
    let (tensors, identities) = collected(model, path)?;
    let mut tensors: BTreeMap<String, Stored> =
        tensors.into_iter().map(|(name, tensor)| (format!("model.{name}"), tensor)).collect();
    let record = optimizer.into_bytes().map_err(|error| broken(format!("the optimizer's record: {error}")))?;
    let record = Stored { dtype: Dtype::U8, shape: vec![record.len()], data: record };
    tensors.insert("optimizer".into(), record);
    for (n, own) in own.into_iter().enumerate() {
        let dtype = own.dtype();
        let own = Stored::new(own).ok_or_else(|| broken(format!("{dtype:?}, which safetensors cannot hold")))?;
        tensors.insert(format!("own.{n}"), own);
    }
    let progress = serde_json::to_value(progress).map_err(|error| broken(format!("the progress: {error}")))?;
    serialized(path, tensors, identities, Some(progress))
}

/// Reads what [`save_training`] wrote into a model and an optimizer made from the same configurations: these, the
/// progress, and the caller's own tensors.
///
/// # Errors
/// As [`load_weights`]; a file that is no training state, or another version's progress.
#[cfg(feature = "autodiff")]
#[allow(clippy::type_complexity, reason = "the four parts of a training state")]
pub fn load_training<M: Module, P: serde::de::DeserializeOwned>(
    path: impl AsRef<Path>,
    model: M,
    optimizer: ModuleOptimizer,
) -> Result<(M, ModuleOptimizer, P, Vec<TensorData>)> {
    let path = path.as_ref();
    let foreign = |problem| checkpoint(path, problem, "resume with the version that wrote it, or begin a new run");
    let bytes = read(path)?;
    let (tensors, footnote) = parse(path, &bytes)?;
    let footnote = footnote.ok_or_else(|| foreign("it is no training state".into()))?;
    let record = tensors.tensor("optimizer").map_err(|_| foreign("it holds no optimizer".into()))?;
    let optimizer = optimizer
        .from_bytes(Bytes::from_bytes_vec(record.data().to_vec()))
        .map_err(|error| foreign(format!("the optimizer's record: {error}")))?;
    let progress = footnote.progress.ok_or_else(|| foreign("it holds no progress".into()))?;
    let progress = serde_json::from_value(progress).map_err(|error| foreign(format!("the progress: {error}")))?;
    let weights = tensors.iter().filter_map(|(name, view)| Some((name.strip_prefix("model.")?, view))).collect();
    let model = restore(path, weights, &footnote.parameters, true, model)?;
    let own = (0..)
        .map_while(|n| tensors.tensor(&format!("own.{n}")).ok())
        .map(|view| read_tensor(&view).ok_or_else(|| foreign(format!("numbers of type {:?}", view.dtype()))));
    Ok((model, optimizer, progress, own.collect::<Result<_>>()?))
}

/// Writes `contents` to `path` so that either the old file or the new one is complete at any moment.
///
/// # Errors
/// A folder that is missing or not writable, a full disk. The old file is then still there.
pub fn write_atomically(path: impl AsRef<Path>, contents: &[u8]) -> Result<()> {
    let path = path.as_ref();
    let failed = |source| Error::Io { path: path.into(), action: "write", source };
    let name = path.file_name().ok_or_else(|| failed(ErrorKind::InvalidFilename.into()))?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut temporary = std::ffi::OsString::from(".");
    temporary.push(name);
    temporary.push(".tmp");
    let temporary = folder.join(temporary);
    let written = File::create(&temporary).and_then(|mut file| {
        file.write_all(contents)?;
        file.sync_all()
    });
    if let Err(error) = written.and_then(|()| fs::rename(&temporary, path)) {
        // Best effort: the error that matters is the first.
        let _ = fs::remove_file(&temporary);
        return Err(failed(error));
    }
    // A rename is on the disk only after the folder is synced as well. Only Unix can open folders.
    #[cfg(unix)]
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)?;
    Ok(())
}

/// A tensor as it goes to the disk.
struct Stored {
    dtype: Dtype,
    shape: Vec<usize>,
    data: Bytes,
}

impl Stored {
    /// None of a type that safetensors has no name for.
    fn new(data: TensorData) -> Option<Self> {
        let (own, shape) = (data.dtype(), data.shape().to_vec());
        if own.is_bool() {
            let data = Bytes::from_elems(data.iter::<bool>().map(u8::from).collect());
            return Some(Self { dtype: Dtype::BOOL, shape, data });
        }
        let (_, dtype) = NUMBERS.into_iter().find(|(dtype, _)| *dtype == own)?;
        Some(Self { dtype, shape, data: data.into_bytes() })
    }
}

/// The parameters of a module by name, and their ids.
fn collected<M: Module>(model: &M, path: &Path) -> Result<(BTreeMap<String, Stored>, BTreeMap<String, u64>)> {
    let (mut tensors, mut identities) = (BTreeMap::new(), BTreeMap::new());
    for tensor in model.collect(None, None, true) {
        let (name, id, dtype) = (tensor.name.clone(), tensor.param_id, tensor.dtype);
        let data = bridge::into_data(tensor).map_err(|error| Error::Device(error.to_string()))?;
        let data = Stored::new(data).ok_or_else(|| {
            let problem = format!("{name} holds {dtype:?}, which safetensors cannot");
            checkpoint(path, problem, "cast the model to f32, f64, f16 or bf16 first")
        })?;
        identities.extend(id.map(|id| (name.clone(), id)));
        tensors.insert(name, data);
    }
    Ok((tensors, identities))
}

/// The types of numbers that a file may hold, in Burn's names and in safetensors'.
const NUMBERS: [(DType, Dtype); 12] = [
    (DType::F64, Dtype::F64),
    (DType::F32, Dtype::F32),
    (DType::F16, Dtype::F16),
    (DType::BF16, Dtype::BF16),
    (DType::I64, Dtype::I64),
    (DType::I32, Dtype::I32),
    (DType::I16, Dtype::I16),
    (DType::I8, Dtype::I8),
    (DType::U64, Dtype::U64),
    (DType::U32, Dtype::U32),
    (DType::U16, Dtype::U16),
    (DType::U8, Dtype::U8),
];

/// FNV-1a over words of 64 bits, of names and numbers in the order of the names.
fn checksum<'a>(tensors: impl Iterator<Item = (&'a str, &'a [u8])>) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut take = |bytes: &[u8]| {
        for word in bytes.chunks(8) {
            let mut padded = [0; 8];
            padded[..word.len()].copy_from_slice(word);
            hash = (hash ^ u64::from_le_bytes(padded)).wrapping_mul(0x0000_0100_0000_01b3);
            // A product moves bits upwards only; words differ mostly at the top.
            hash = hash.rotate_left(29);
        }
        hash = (hash ^ bytes.len() as u64).wrapping_mul(0x0000_0100_0000_01b3);
    };
    for (name, data) in tensors {
        take(name.as_bytes());
        take(data);
    }
    format!("{hash:016x}")
}

fn serialized(
    path: &Path,
    tensors: BTreeMap<String, Stored>,
    parameters: BTreeMap<String, u64>,
    progress: Option<serde_json::Value>,
) -> Result<Vec<u8>> {
    let broken = |error: String| checkpoint(path, format!("cannot be serialised: {error}"), BUG);
    let checksum = checksum(tensors.iter().map(|(name, tensor)| (name.as_str(), &*tensor.data)));
    let footnote = serde_json::to_string(&Footnote { checksum, parameters, progress })
        .map_err(|error| broken(error.to_string()))?;
    let views = tensors
        .iter()
        .map(|(name, tensor)| Ok((name, TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.data)?)))
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()
        .map_err(|error| broken(error.to_string()))?;
    safetensors::serialize(views, Some([(METADATA.to_owned(), footnote)].into()))
        .map_err(|error| broken(error.to_string()))
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|source| Error::Io { path: path.into(), action: "read", source })
}

const BUG: &str = "this is a bug; report it";
const DAMAGED: &str = "the file is damaged or cut short; restore it from a copy or train again";

/// What is wrong with a file, and what to do.
fn checkpoint(path: &Path, problem: String, help: &'static str) -> Error {
    Error::Checkpoint { path: path.into(), problem, help }
}

fn parse<'a>(path: &Path, bytes: &'a [u8]) -> Result<(SafeTensors<'a>, Option<Footnote>)> {
    let damaged = |problem| checkpoint(path, problem, DAMAGED);
    let tensors = SafeTensors::deserialize(bytes).map_err(|error| damaged(error.to_string()))?;
    let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(|error| damaged(error.to_string()))?;
    let Some(footnote) = metadata.metadata().as_ref().and_then(|entries| entries.get(METADATA)) else {
        return Ok((tensors, None));
    };
    let footnote: Footnote =
        serde_json::from_str(footnote).map_err(|error| damaged(format!("its metadata: {error}")))?;
    let by_name: BTreeMap<&str, TensorView<'_>> = tensors.iter().collect();
    let found = checksum(by_name.iter().map(|(name, view)| (*name, view.data())));
    if found != footnote.checksum {
        return Err(damaged(format!("its numbers have the checksum {found}, not {}", footnote.checksum)));
    }
    Ok((tensors, Some(footnote)))
}

/// Puts stored tensors, and identities where there are any, into a module. `whole`: a checksum has shown that the numbers are those that
/// were saved, whatever they are.
fn restore<M: Module>(
    path: &Path,
    mut tensors: BTreeMap<&str, TensorView<'_>>,
    identities: &BTreeMap<String, u64>,
    whole: bool,
    model: M,
) -> Result<M> {
    let own = model.collect(None, None, true).into_iter().map(|own| {
        let name = own.name;
        let missing = || differs(path, format!("it holds no tensor {name}"));
        let view = tensors.remove(name.as_str()).ok_or_else(missing)?;
        let data = data(path, &name, &view, &own.shape, own.dtype, whole)?;
        let id = identities.get(&name).copied();
        Ok(bridge::from_data(data, name, id))
    });
    let own = own.collect::<Result<_>>()?;
    if let Some((name, _)) = tensors.first_key_value() {
        return Err(differs(path, format!("it holds {name}, which the model does not have")));
    }
    Ok(applied(path, model, own, None)?.0)
}

fn applied<M: Module>(
    path: &Path,
    mut model: M,
    tensors: Vec<PackTensor>,
    adapter: Option<Box<dyn ModuleAdapter>>,
) -> Result<(M, ApplyResult)> {
    let result = model.apply(tensors, None, adapter, true);
    match result.errors.first() {
        None => Ok((model, result)),
        Some(error) => Err(differs(path, error.to_string())),
    }
}

fn differs(path: &Path, problem: String) -> Error {
    checkpoint(path, problem, "its configuration belongs to another model; use the one it was trained with")
}

/// The stored tensor in the place of one of this shape and type.
fn data(
    path: &Path,
    name: &str,
    view: &TensorView<'_>,
    shape: &[usize],
    dtype: DType,
    whole: bool,
) -> Result<TensorData> {
    // Backends have integers of their own.
    let fits = |data: &TensorData| data.dtype() == dtype || is_integer(dtype) && is_integer(data.dtype());
    let Some(data) = read_tensor(view).filter(|data| data.shape().as_slice() == shape && fits(data)) else {
        let found = format!("{:?} of {:?}", view.shape(), view.dtype());
        return Err(differs(path, format!("{name} is {found}, the model wants {shape:?} of {dtype:?}")));
    };
    if !whole && !is_finite(&data) {
        return Err(checkpoint(path, format!("{name} holds NaN or infinity"), DAMAGED));
    }
    data.try_cast(dtype).map_err(|error| differs(path, format!("{name}: {error}")))
}

/// A tensor of a file; none of a type that Burn has no name for.
fn read_tensor(view: &TensorView<'_>) -> Option<TensorData> {
    if view.dtype() == Dtype::BOOL {
        return Some(TensorData::new(view.data().iter().map(|&x| x != 0).collect::<Vec<_>>(), view.shape()));
    }
    let (dtype, _) = NUMBERS.into_iter().find(|(_, dtype)| *dtype == view.dtype())?;
    Some(TensorData::from_bytes_vec(view.data().to_vec(), view.shape().to_vec(), dtype))
}

fn is_integer(dtype: DType) -> bool {
    dtype.is_int() || dtype.is_uint()
}

fn is_finite(data: &TensorData) -> bool {
    !data.dtype().is_float() || data.iter::<f64>().all(f64::is_finite)
}

/// Reads a safetensors file of PyTorch's layout into `model`: weights of linear layers are transposed, numbers converted to the model's type.
/// `names` turns the file's names into the model's ([`pytorch_names`] knows some). The rows of what is one tensor here may be several there,
/// `NAME.0.weight`, `NAME.1.weight` and so on; a layer without a bias there has one of 0 here. What neither side has stands in the result.
///
/// ```no_run
/// use burn::tensor::Device;
/// use longspan::checkpoint::{import_weights, pytorch_names};
/// use longspan::models::LanguageModelConfig;
///
/// # fn main() -> longspan::Result<()> {
/// let model = LanguageModelConfig::new(32_000).init(&Device::flex())?;
/// let (model, result) = import_weights("model.safetensors", model, &pytorch_names())?;
/// println!("kept as they were: {:?}, left in the file: {:?}", result.missing, result.unused);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// A file that cannot be read or is no safetensors file, tensors of other shapes or kinds of number than the model's, numbers that the model's
/// type does not hold, and two tensors in one place.
pub fn import_weights<M: Module>(path: impl AsRef<Path>, model: M, names: &KeyRemapper) -> Result<(M, ApplyResult)> {
    let path = path.as_ref();
    let bytes = read(path)?;
    let (tensors, _) = parse(path, &bytes)?;
    let own = model.collect(None, None, true).into_iter().map(|own| (own.name.clone(), own));
    let own: BTreeMap<String, PackTensor> = own.collect();
    let mut parts = BTreeMap::<String, BTreeMap<usize, TensorData>>::new();
    for (name, view) in tensors.iter() {
        let foreign = || {
            let problem = format!("{name} holds numbers of type {:?}", view.dtype());
            checkpoint(path, problem, "write the file in f32, f16 or bf16 first")
        };
        let data = read_tensor(&view).ok_or_else(foreign)?;
        let renamed = names.remap(vec![bridge::from_data(data, name.into(), None)]).0.remove(0);
        let (name, part) = match part_of(&renamed.name) {
            Some((whole, part)) if own.contains_key(&whole) => (whole, part),
            _ => (renamed.name.clone(), 0),
        };
        let data = bridge::into_data(renamed).map_err(|error| differs(path, error.to_string()))?;
        let data = match own.get(&name) {
            Some(own) => converted(path, &name, data, own.dtype)?,
            None => data,
        };
        if parts.entry(name.clone()).or_default().insert(part, data).is_some() {
            return Err(checkpoint(path, format!("two of its tensors are {name} in the model"), "correct the names"));
        }
    }
    let joined = |(name, parts): (&String, &BTreeMap<usize, TensorData>)| {
        let parts: Vec<&TensorData> = parts.values().collect();
        let mut shape = parts[0].shape().to_vec();
        if parts.len() > 1 {
            let alike = parts.iter().all(|part| !part.shape().is_empty() && part.shape()[1..] == shape[1..]);
            if !alike {
                return Err(differs(path, format!("the parts of {name} have rows of different widths")));
            }
            shape[0] = parts.iter().map(|part| part.shape()[0]).sum();
        }
        let bytes = parts.iter().flat_map(|part| part.as_bytes()).copied().collect();
        Ok(bridge::from_data(TensorData::from_bytes_vec(bytes, shape, parts[0].dtype()), name.clone(), None))
    };
    let mut tensors = parts.iter().map(joined).collect::<Result<Vec<_>>>()?;
    for (name, own) in &own {
        let weight = name.strip_suffix("bias").map(|layer| format!("{layer}weight"));
        if !parts.contains_key(name) && weight.is_some_and(|weight| parts.contains_key(&weight)) {
            let zeros = TensorData::zeros::<f32, _>(own.shape.clone()).convert_dtype(own.dtype);
            tensors.push(bridge::from_data(zeros, name.clone(), None));
        }
    }
    applied(path, model, tensors, Some(Box::new(PyTorchToBurnAdapter)))
}

/// Numbers of the same kind in another type, all of which it holds.
fn converted(path: &Path, name: &str, data: TensorData, dtype: DType) -> Result<TensorData> {
    let stored = data.dtype();
    if [stored, dtype].map(is_integer) != [is_integer(dtype); 2] || stored.is_bool() != dtype.is_bool() {
        return Err(differs(path, format!("{name} is of {stored:?}, the model wants {dtype:?}")));
    }
    let data = data.convert_dtype(dtype);
    if is_finite(&data) {
        return Ok(data);
    }
    let problem = format!("{name} holds numbers that are no finite ones in {dtype:?}");
    Err(checkpoint(path, problem, "restore it from a copy, or load it into a model of f32"))
}

/// `NAME.weight` and 2 of `NAME.2.weight`.
fn part_of(name: &str) -> Option<(String, usize)> {
    let (layer, leaf) = name.rsplit_once('.')?;
    let (layer, part) = layer.rsplit_once('.')?;
    Some((format!("{layer}.{leaf}"), part.parse().ok()?))
}

/// The names of PyTorch's `nn.MultiheadAttention` and `nn.TransformerEncoder`, and of Hugging Face's models that are built as Llama is, for
/// [`import_weights`] into a [`MultiHeadAttention`](crate::attention::MultiHeadAttention) or a
/// [`LanguageModel`](crate::models::LanguageModel). Further patterns can be added to them.
pub fn pytorch_names() -> KeyRemapper {
    let names = [
        (r"^model\.embed_tokens\.", "embedding."),
        (r"^model\.norm\.", "norm."),
        (r"^lm_head\.", "output."),
        (r"^(?:model\.)?layers\.", "blocks."),
        (r"\.self_attn\.", ".attention."),
        (r"(^|\.)in_proj_(weight|bias)$", "${1}query_key_value.$2"),
        (r"(^|\.)q_proj\.", "${1}query_key_value.0."),
        (r"(^|\.)k_proj\.", "${1}query_key_value.1."),
        (r"(^|\.)v_proj\.", "${1}query_key_value.2."),
        (r"(^|\.)o(?:ut)?_proj\.", "${1}output."),
        (r"\.mlp\.gate_proj\.", ".feed_forward.inner.0."),
        (r"\.mlp\.up_proj\.", ".feed_forward.inner.1."),
        (r"\.linear1\.", ".feed_forward.inner."),
        (r"\.(?:mlp\.down_proj|linear2)\.", ".feed_forward.outer."),
        (r"\.(?:input_layernorm|norm1)\.", ".attention_norm."),
        (r"\.(?:post_attention_layernorm|norm2)\.", ".feed_forward_norm."),
        (r"norm\.weight$", "norm.gamma"),
        (r"norm\.bias$", "norm.beta"),
    ];
    KeyRemapper::from_patterns(names.to_vec()).expect("patterns that a test compiles")
}
