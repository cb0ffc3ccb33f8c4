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
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::Path;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId, Parameter};
use burn::optim::ModuleOptimizer;
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, Bytes, DType, Int, Tensor, TensorData};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::de::DeserializeOwned;
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
    let parameters = Collected::of(model, path.as_ref())?;
    serialized(path.as_ref(), parameters.tensors, BTreeMap::new(), None)
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
pub fn training_to_bytes<M: Module>(
    path: impl AsRef<Path>,
    model: &M,
    optimizer: &ModuleOptimizer,
    progress: &impl Serialize,
    own: Vec<TensorData>,
) -> Result<Vec<u8>> {
    let path = path.as_ref();
    let broken = |problem| checkpoint(path, problem, BUG);
    let parameters = Collected::of(model, path)?;
    let mut tensors: BTreeMap<String, Stored> =
        parameters.tensors.into_iter().map(|(name, tensor)| (format!("model.{name}"), tensor)).collect();
    let record = optimizer.into_bytes().map_err(|error| broken(format!("the optimizer's record: {error}")))?;
    let record = Stored { dtype: Dtype::U8, shape: vec![record.len()], data: record };
    tensors.insert("optimizer".into(), record);
    for (n, own) in own.into_iter().enumerate() {
        let (data, shape, dtype) = own.into_parts();
        let dtype = stored_dtype(dtype).ok_or_else(|| broken(format!("{dtype:?}, which safetensors cannot hold")))?;
        tensors.insert(format!("own.{n}"), Stored { dtype, shape: shape.to_vec(), data });
    }
    let progress = serde_json::to_value(progress).map_err(|error| broken(format!("the progress: {error}")))?;
    serialized(path, tensors, parameters.identities, Some(progress))
}

/// Reads what [`save_training`] wrote into a model and an optimizer made from the same configurations: these, the
/// progress, and the caller's own tensors.
///
/// # Errors
/// As [`load_weights`]; a file that is no training state, or another version's progress.
#[allow(clippy::type_complexity, reason = "the four parts of a training state")]
pub fn load_training<M: Module, P: DeserializeOwned>(
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
    let own = (0..).map_while(|n| tensors.tensor(&format!("own.{n}")).ok()).map(|view| {
        let dtype = [DType::F64, DType::F32, DType::F16, DType::BF16]
            .into_iter()
            .find(|&dtype| stored_dtype(dtype) == Some(view.dtype()));
        let dtype = dtype.ok_or_else(|| foreign(format!("numbers of type {:?}", view.dtype())))?;
        Ok(TensorData::from_bytes_vec(view.data().to_vec(), view.shape().to_vec(), dtype))
    });
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

/// The parameters of a module by name.
struct Collected<'a> {
    names: Names,
    path: &'a Path,
    tensors: BTreeMap<String, Stored>,
    identities: BTreeMap<String, u64>,
    error: Option<Error>,
}

impl<'a> Collected<'a> {
    fn of<M: Module>(model: &M, path: &'a Path) -> Result<Self> {
        let mut collected =
            Self { names: Names::default(), path, tensors: BTreeMap::new(), identities: BTreeMap::new(), error: None };
        model.visit(&mut collected);
        match collected.error.take() {
            None => Ok(collected),
            Some(error) => Err(error),
        }
    }

    fn keep(&mut self, id: ParamId, data: Result<TensorData, impl Display>) {
        let name = self.names.current();
        let stored = data.map_err(|error| Error::Device(error.to_string())).and_then(|data| {
            let dtype = stored_dtype(data.dtype()).ok_or_else(|| {
                let problem = format!("{name} holds {:?}, which safetensors cannot", data.dtype());
                checkpoint(self.path, problem, "cast the model to f32, f64, f16 or bf16 first")
            })?;
            let (bytes, shape) = match dtype {
                Dtype::BOOL => (Bytes::from_elems(data.iter::<bool>().map(u8::from).collect()), data.shape().to_vec()),
                _ => {
                    let (bytes, shape, _) = data.into_parts();
                    (bytes, shape.to_vec())
                }
            };
            Ok(Stored { dtype, shape, data: bytes })
        });
        match stored {
            Ok(stored) => {
                self.identities.insert(name.clone(), id.val());
                self.tensors.insert(name, stored);
            }
            Err(error) => self.error = self.error.take().or(Some(error)),
        }
    }
}

impl ModuleVisitor for Collected<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.keep(param.id, param.val().try_into_data());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.keep(param.id, param.val().try_into_data());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.keep(param.id, param.val().try_into_data());
    }

    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.names.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        self.names.exit(container_type);
    }
}

/// The name of the current parameter: the fields that lead to it, without names of enum variants.
#[derive(Default)]
struct Names(Vec<String>);

impl Names {
    fn enter(&mut self, name: &str, container_type: &str) {
        if !container_type.starts_with("Enum:") {
            self.0.push(name.into());
        }
    }

    fn exit(&mut self, container_type: &str) {
        if !container_type.starts_with("Enum:") {
            self.0.pop();
        }
    }

    fn current(&self) -> String {
        self.0.join(".")
    }
}

fn stored_dtype(dtype: DType) -> Option<Dtype> {
    Some(match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::I16 => Dtype::I16,
        DType::I8 => Dtype::I8,
        DType::U64 => Dtype::U64,
        DType::U32 => Dtype::U32,
        DType::U16 => Dtype::U16,
        DType::U8 => Dtype::U8,
        DType::Bool(_) => Dtype::BOOL,
        _ => return None,
    })
}

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

/// Puts stored tensors, and identities where there are any, into a module.
fn restore<M: Module>(
    path: &Path,
    tensors: BTreeMap<&str, TensorView<'_>>,
    identities: &BTreeMap<String, u64>,
    whole: bool,
    model: M,
) -> Result<M> {
    let mut restorer = Restorer { names: Names::default(), path, tensors, identities, whole, error: None };
    let model = model.map(&mut restorer);
    if let Some(error) = restorer.error {
        return Err(error);
    }
    match restorer.tensors.first_key_value() {
        None => Ok(model),
        Some((name, _)) => Err(restorer.differs(format!("it holds {name}, which the model does not have"))),
    }
}

struct Restorer<'a> {
    names: Names,
    path: &'a Path,
    /// Those not yet restored.
    tensors: BTreeMap<&'a str, TensorView<'a>>,
    identities: &'a BTreeMap<String, u64>,
    /// Whether a checksum has shown that the numbers are those that were saved, whatever they are.
    whole: bool,
    error: Option<Error>,
}

impl Restorer<'_> {
    fn differs(&self, problem: String) -> Error {
        checkpoint(self.path, problem, "its configuration belongs to another model; use the one it was trained with")
    }

    /// The stored tensor in the place of one of these sizes.
    fn data(&mut self, shape: &[usize], dtype: DType) -> Result<TensorData> {
        let name = self.names.current();
        let view =
            self.tensors.remove(name.as_str()).ok_or_else(|| self.differs(format!("it holds no tensor {name}")))?;
        // Backends have integers of their own.
        let integers = if dtype.is_int() || dtype.is_uint() { &INTEGERS[..] } else { &[] };
        let stored = integers.iter().chain([&dtype]).find(|&&dtype| stored_dtype(dtype) == Some(view.dtype()));
        let (Some(&stored), true) = (stored, view.shape() == shape) else {
            return Err(self.differs(format!(
                "{name} is {:?} of {:?}, the model wants {shape:?} of {dtype:?}",
                view.shape(),
                view.dtype()
            )));
        };
        let finite = match view.dtype() {
            Dtype::F32 => view.data().as_chunks().0.iter().all(|&x| f32::from_le_bytes(x).is_finite()),
            Dtype::F64 => view.data().as_chunks().0.iter().all(|&x| f64::from_le_bytes(x).is_finite()),
            _ => true,
        };
        if !self.whole && !finite {
            return Err(checkpoint(self.path, format!("{name} holds NaN or infinity"), DAMAGED));
        }
        if view.dtype() == Dtype::BOOL {
            return Ok(TensorData::new(view.data().iter().map(|&x| x != 0).collect::<Vec<_>>(), shape));
        }
        let data = TensorData::from_bytes_vec(view.data().to_vec(), shape, stored);
        data.try_cast(dtype).map_err(|error| self.differs(format!("{name}: {error}")))
    }

    fn restored<const D: usize, K: Basic>(
        &mut self,
        param: Param<Tensor<D, K>>,
        set: impl FnOnce(&Tensor<D, K>, Tensor<D, K>) -> Tensor<D, K>,
    ) -> Param<Tensor<D, K>>
    where
        Tensor<D, K>: Parameter,
    {
        if self.error.is_some() {
            return param;
        }
        let (id, old, mapper) = param.consume();
        let id = self.identities.get(&self.names.current()).map_or(id, |&known| ParamId::from(known));
        let value = match self.data(&old.dims(), old.dtype()) {
            Ok(data) => set(&old, Tensor::from_data(data, (&old.device(), old.dtype()))),
            Err(error) => {
                self.error = Some(error);
                old
            }
        };
        Param::from_mapped_value(id, value, mapper)
    }
}

/// The types of integers that a file may hold.
const INTEGERS: [DType; 8] =
    [DType::I64, DType::I32, DType::I16, DType::I8, DType::U64, DType::U32, DType::U16, DType::U8];

impl ModuleMapper for Restorer<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.restored(param, |old, new| new.set_require_grad(old.is_require_grad()))
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.restored(param, |_, new| new)
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        self.restored(param, |_, new| new)
    }

    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.names.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        self.names.exit(container_type);
    }
}
