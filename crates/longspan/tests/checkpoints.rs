//! Files hold what was saved, whole, or say in one line what is wrong with them.

use std::fs;
use std::path::Path;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::LinearConfig;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use longspan::attention::{AttentionConfig, MultiHeadAttentionConfig};
use longspan::checkpoint::{
    import_weights, load_training, load_weights, pytorch_names, save_training, save_weights, write_atomically,
};
use longspan::layers::{Activation, NormKind};
use longspan::models::{BlockConfig, LanguageModelConfig, Seq2Seq, Seq2SeqConfig};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

fn config(block: BlockConfig) -> Seq2SeqConfig {
    let block = block.with_d_model(8).with_heads(2).with_d_ff(12).with_dropout(0.0);
    Seq2SeqConfig::new(9, 7).with_block(block).with_encoder_layers(1).with_decoder_layers(1)
}

fn fresh(seed: u64) -> Seq2Seq {
    let device = Device::flex().autodiff();
    device.seed(seed);
    config(BlockConfig::new()).init(&device).unwrap()
}

fn ids(numbers: &[i64], shape: [usize; 2]) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new(numbers.to_vec(), shape), &Device::flex().autodiff())
}

fn logits(model: &Seq2Seq) -> Tensor<3> {
    model.forward(ids(&[3, 4, 5, 6, 7, 8], [2, 3]), &[3, 2], ids(&[1, 2, 3, 4], [2, 2])).unwrap()
}

fn bits(x: Tensor<3>) -> Vec<u32> {
    x.try_into_vec_as::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

fn train(mut model: Seq2Seq, optimizer: &mut ModuleOptimizer, steps: usize) -> (Seq2Seq, Vec<u32>) {
    let mut losses = Vec::new();
    for _ in 0..steps {
        let loss = logits(&model).powi_scalar(2).mean();
        losses.push(loss.clone().into_scalar::<f32>().to_bits());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, gradients);
    }
    (model, losses)
}

#[test]
fn weights_come_back_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let model = fresh(1);
    save_weights(&path, &model).unwrap();
    let other = fresh(2);
    assert_ne!(bits(logits(&model)), bits(logits(&other)));
    let loaded = load_weights(&path, other).unwrap();
    assert_eq!(bits(logits(&model)), bits(logits(&loaded)));
    // Weights from a training device serve on one without autodiff, and the other way round.
    assert_eq!(bits(logits(&load_weights(&path, fresh(3).valid()).unwrap())), bits(logits(&model)));
    // Saving again gives the same file, and nothing else is left in the folder.
    let first = fs::read(&path).unwrap();
    save_weights(&path, &loaded).unwrap();
    assert_eq!(first, fs::read(&path).unwrap());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn tensors_of_the_callers_own_come_back_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("training.safetensors");
    let optimizer = || AdamWConfig::new().init();
    let mut own: Vec<TensorData> = (0..12).map(|n| TensorData::new(vec![0.1f32 * n as f32, -1e-30], [2, 1])).collect();
    own.extend([TensorData::from([1_i64 << 40, -3]), TensorData::from([7_u8]), TensorData::from([true, false])]);
    let first = fresh(1);
    save_training(&path, &first, &optimizer(), &7u32, own.clone()).unwrap();
    let (model, _, progress, found) = load_training::<_, u32>(&path, fresh(2), optimizer()).unwrap();
    assert_eq!((progress, found), (7, own));
    assert_eq!(bits(logits(&model)), bits(logits(&first)));
    save_training(&path, &model, &optimizer(), &8u32, Vec::new()).unwrap();
    assert!(load_training::<_, u32>(&path, fresh(2), optimizer()).unwrap().3.is_empty());
}

#[test]
fn names_and_shapes_are_the_documented_ones() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    save_weights(&path, &fresh(1)).unwrap();
    let bytes = fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for (name, shape) in [
        ("encoder.0.attention.query_key_value.weight", vec![8, 24]),
        ("encoder.0.attention.query_key_value.bias", vec![24]),
        ("encoder.0.attention.attention.relative", vec![2, 33, 4]),
        ("decoder.0.cross_attention.output.weight", vec![8, 8]),
        ("decoder.0.feed_forward.inner.weight", vec![8, 12]),
        ("encoder_norm.gamma", vec![8]),
        ("source_embedding.weight", vec![9, 8]),
        ("output.weight", vec![8, 7]),
    ] {
        assert_eq!(file.tensor(name).unwrap_or_else(|_| panic!("{name}")).shape(), shape, "{name}");
    }
    let gated = config(BlockConfig::new().with_gated_attention(true)).init(&Device::flex()).unwrap();
    save_weights(&path, &gated).unwrap();
    let bytes = fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.tensor("encoder.0.attention.query_key_value.weight").unwrap().shape(), [8, 32]);
    assert_eq!(file.tensor("decoder.0.cross_attention.gated_norm.gamma").unwrap().shape(), [8]);
}

#[test]
fn training_goes_on_to_the_same_losses() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("training.safetensors");
    let optimizer = || AdamWConfig::new().init();
    // Tests run at once and share one random generator, so one start serves both runs.
    let start = fresh(1);
    let (_, whole) = train(start.clone(), &mut optimizer(), 6);

    let mut first = optimizer();
    let (model, before) = train(start, &mut first, 3);
    save_training(&path, &model, &first, &("step", 3), Vec::new()).unwrap();
    let (model, mut second, progress, _) = load_training::<_, (String, usize)>(&path, fresh(99), optimizer()).unwrap();
    assert_eq!(progress, ("step".to_owned(), 3));
    let (_, after) = train(model, &mut second, 3);
    assert_eq!([before, after].concat(), whole);
}

/// What loading says of a file.
fn complaint(path: &Path) -> String {
    let error = load_weights(path, fresh(2)).expect_err("a broken file was loaded").to_string();
    assert!(error.contains(path.to_str().unwrap()), "{error}");
    assert!(!error.contains('\n'), "{error}");
    error
}

#[test]
fn every_cut_and_every_changed_byte_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    save_weights(&path, &fresh(1)).unwrap();
    let whole = fs::read(&path).unwrap();
    for length in (0..whole.len()).step_by(97).chain([1, 7, 8, 9, whole.len() - 1]) {
        fs::write(&path, &whole[..length]).unwrap();
        complaint(&path);
    }
    for at in (0..whole.len()).step_by(61) {
        let mut changed = whole.clone();
        changed[at] ^= 0x10;
        fs::write(&path, &changed).unwrap();
        complaint(&path);
    }
    fs::write(&path, [whole.as_slice(), b"more"].concat()).unwrap();
    complaint(&path);
}

#[test]
fn foreign_files_are_taken_as_they_are_and_checked_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let model = fresh(1);
    save_weights(&path, &model).unwrap();
    let bytes = fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    // As another program would write them: without our metadata.
    let tensors: Vec<(String, TensorView<'_>)> = file.iter().map(|(n, v)| (n.to_owned(), v)).collect();
    let write = |tensors: Vec<(String, TensorView<'_>)>| {
        fs::write(&path, safetensors::serialize(tensors, None).unwrap()).unwrap();
    };
    let with_bias = |view: TensorView<'_>| {
        let rest = tensors.iter().filter(|(name, _)| name != "output.bias").cloned();
        write(rest.chain([("output.bias".to_owned(), view)]).collect());
    };
    write(tensors.clone());
    assert_eq!(bits(logits(&load_weights(&path, fresh(2)).unwrap())), bits(logits(&model)));

    write(tensors.iter().filter(|(name, _)| name != "output.bias").cloned().collect());
    assert!(complaint(&path).contains("no tensor output.bias"));

    let surplus = ("surplus".to_owned(), file.tensor("output.bias").unwrap());
    write(tensors.iter().cloned().chain([surplus]).collect());
    assert!(complaint(&path).contains("surplus"));

    with_bias(file.tensor("encoder_norm.beta").unwrap());
    assert!(complaint(&path).contains("output.bias is [8]"));

    with_bias(TensorView::new(safetensors::Dtype::F16, vec![7], &[0; 14]).unwrap());
    assert!(complaint(&path).contains("F16"));

    with_bias(TensorView::new(safetensors::Dtype::F32, vec![7], &[f32::NAN.to_le_bytes(); 7].concat()).unwrap());
    assert!(complaint(&path).contains("NaN"));
}

#[test]
fn a_file_that_is_not_there_or_not_a_training_state_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    assert!(complaint(&path).contains("cannot read"));
    save_weights(&path, &fresh(1)).unwrap();
    let result = load_training::<_, u32>(&path, fresh(1), AdamWConfig::new().init());
    assert!(result.err().unwrap().to_string().contains("no optimizer"));
    save_training(&path, &fresh(1), &AdamWConfig::new().init(), &"text", Vec::new()).unwrap();
    let result = load_training::<_, u32>(&path, fresh(1), AdamWConfig::new().init());
    assert!(result.err().unwrap().to_string().contains("progress"));
}

#[test]
fn a_failed_write_leaves_the_old_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    write_atomically(&path, b"old").unwrap();
    // A folder in the way of the temporary file stands for every reason why it cannot be written.
    fs::create_dir(folder.path().join(".file.tmp")).unwrap();
    let error = write_atomically(&path, b"new").unwrap_err().to_string();
    assert!(error.contains("cannot write") && error.contains(path.to_str().unwrap()), "{error}");
    assert_eq!(fs::read(&path).unwrap(), b"old");
    let error = write_atomically(folder.path().join("no/such/folder"), b"new").unwrap_err().to_string();
    assert!(error.contains("cannot write"), "{error}");
    // What a killed process left behind is overwritten.
    fs::remove_dir(folder.path().join(".file.tmp")).unwrap();
    fs::write(folder.path().join(".file.tmp"), b"half").unwrap();
    write_atomically(&path, b"new").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"new");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

/// A model as Hugging Face and as PyTorch would write it: rows for columns, parts of a layer apart, no biases where there are none.
#[test]
fn files_of_other_names_and_layouts_give_the_same_model() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let block = BlockConfig::new().with_d_model(8).with_heads(4).with_kv_heads(Some(2)).with_d_ff(12).with_dropout(0.0);
    let llama = block.clone().with_norm_kind(NormKind::Rms).with_activation(Activation::Silu).with_gated(true);
    let model = |block: &BlockConfig| {
        let softmax = vec![AttentionConfig::softmax()];
        let config = LanguageModelConfig::new(7).with_block(block.clone()).with_layers(2).with_tied(false);
        config.with_attention(softmax).init(&device).unwrap()
    };
    // Columns `from..to` of a weight as rows, or entries of a bias.
    let part = |view: &TensorView<'_>, [from, to]: [usize; 2]| -> (Vec<usize>, Vec<u8>) {
        let columns = *view.shape().last().unwrap();
        let rows: Vec<&[u8]> = view.data().chunks(4 * columns).collect();
        let part = (from..to).flat_map(|c| rows.iter().flat_map(move |row| row[4 * c..][..4].to_vec())).collect();
        (if view.shape().len() == 1 { vec![to - from] } else { vec![to - from, rows.len()] }, part)
    };
    let as_llama: &[(&str, &str)] = &[
        ("blocks.", "model.layers."),
        (".attention.query_key_value.", ".self_attn.?_proj."),
        (".attention.output.", ".self_attn.o_proj."),
        (".feed_forward.inner.", ".mlp.?_proj."),
        (".feed_forward.outer.", ".mlp.down_proj."),
        ("attention_norm.gamma", "input_layernorm.weight"),
        ("feed_forward_norm.gamma", "post_attention_layernorm.weight"),
        ("embedding.", "model.embed_tokens."),
        ("output.", "lm_head."),
        ("norm.gamma", "model.norm.weight"),
    ];
    let as_torch: &[(&str, &str)] = &[
        ("blocks.", "layers."),
        (".attention.query_key_value.", ".self_attn.in_proj_"),
        (".attention.output.", ".self_attn.out_proj."),
        (".feed_forward.inner.", ".linear1."),
        (".feed_forward.outer.", ".linear2."),
        ("attention_norm.", "norm1."),
        ("feed_forward_norm.", "norm2."),
        ("output.", "lm_head."),
        ("gamma", "weight"),
        ("beta", "bias"),
    ];
    for (block, names) in [(&llama, as_llama), (&block, as_torch)] {
        let (source, llama) = (model(block), names == as_llama);
        save_weights(&path, &source).unwrap();
        let bytes = fs::read(&path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let mut other = Vec::new();
        for (own, view) in file.iter() {
            let name = names.iter().fold(own.to_owned(), |name, (from, to)| name.replace(from, to));
            let columns = *view.shape().last().unwrap();
            let parts = match name.contains('?') {
                true if name.contains("attn") => vec![("q", [0, 8]), ("k", [8, 12]), ("v", [12, 16])],
                true => vec![("gate", [0, 12]), ("up", [12, 24])],
                false => vec![("", [0, columns])],
            };
            // Llama has no biases but those of queries, keys and values, if it has these.
            if llama && own.ends_with("bias") && !own.contains("query_key_value") {
                continue;
            }
            for (letter, range) in parts {
                let (shape, numbers) = if own.contains("embedding") {
                    (view.shape().to_vec(), view.data().to_vec())
                } else {
                    part(&view, range)
                };
                other.push((name.replace('?', letter), shape, numbers));
            }
        }
        let views = other.iter().map(|(name, shape, numbers)| {
            (name.clone(), TensorView::new(safetensors::Dtype::F32, shape.clone(), numbers).unwrap())
        });
        fs::write(&path, safetensors::serialize(views.collect::<Vec<_>>(), None).unwrap()).unwrap();
        let (found, result) = import_weights(&path, model(block), &pytorch_names()).unwrap();
        assert_eq!((result.missing, result.unused), (Vec::new(), Vec::<String>::new()), "{llama}");
        let mut expected = source;
        if llama {
            let zero = |linear: &mut burn::nn::Linear| {
                linear.bias = linear.bias.take().map(|bias| Param::from_tensor(bias.val() * 0.0));
            };
            expected.blocks.iter_mut().for_each(|block| {
                zero(&mut block.attention.output);
                zero(&mut block.feed_forward.inner);
                zero(&mut block.feed_forward.outer);
            });
            expected.output.as_mut().map(zero);
        }
        let tokens = Tensor::<2, Int>::from_data([[1, 2, 3, 4, 5, 6]], &device);
        let [found, expected] = [found, expected].map(|model| bits(model.forward(tokens.clone()).unwrap()));
        assert_eq!(found, expected, "{llama}");
        // Doubles take the numbers too, and another width is an error.
        let wide = model(block).map(&mut Doubles);
        let (wide, _) = import_weights(&path, wide, &pytorch_names()).unwrap();
        assert_eq!(wide.forward(tokens).unwrap().dtype(), burn::tensor::DType::F64);
        assert!(import_weights(&path, model(&block.clone().with_d_ff(16)), &pytorch_names()).is_err());
    }
}

/// A file that is imported has one tensor for a place, of the same kind of numbers, all of which the model's type holds.
#[test]
fn imported_numbers_are_those_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let device = Device::flex();
    let attention = || MultiHeadAttentionConfig::new(2, 1).init(&device).unwrap();
    let bytes = |number: f32| [number; 4].iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let error = |tensors: &[(&str, Dtype, &[u8])], model| {
        let views = tensors.iter().map(|(name, dtype, data)| {
            let view = TensorView::new(*dtype, vec![2, 2], data).unwrap();
            (name.to_string(), view)
        });
        fs::write(&path, safetensors::serialize(views.collect::<Vec<_>>(), None).unwrap()).unwrap();
        import_weights(&path, model, &pytorch_names()).err().map_or(String::new(), |error| error.to_string())
    };
    let name = "out_proj.weight";
    assert_eq!(error(&[(name, Dtype::F32, &bytes(0.5))], attention()), "");
    let halves = attention().map(&mut Halves);
    assert!(error(&[(name, Dtype::F32, &bytes(1e30))], halves).contains("no finite ones in F16"));
    assert!(error(&[(name, Dtype::F32, &bytes(f32::NAN))], attention()).contains("no finite ones"));
    assert!(error(&[(name, Dtype::I64, &[1; 32])], attention()).contains("is of I64"));
    assert!(error(&[(name, Dtype::BOOL, &[1; 4])], attention()).contains("is of Bool"));
    assert!(error(&[(name, Dtype::F8_E4M3, &[1; 4])], attention()).contains("type F8_E4M3"));
    let both = [(name, Dtype::F32, &bytes(0.5)[..]), ("o_proj.weight", Dtype::F32, &bytes(0.25))];
    assert!(error(&both, attention()).contains("two of its tensors are output.weight"));
    // A file from elsewhere, of the model's own names.
    let numbers = [0x7e00_u16; 4].iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let layer = LinearConfig::new(2, 2).with_bias(false).init(&device).map(&mut Halves);
    let view = TensorView::new(Dtype::F16, vec![2, 2], &numbers).unwrap();
    fs::write(&path, safetensors::serialize([("weight", view)], None).unwrap()).unwrap();
    assert!(load_weights(&path, layer).unwrap_err().to_string().contains("weight holds NaN"));
}

struct Halves;

impl ModuleMapper for Halves {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|x| x.cast(FloatDType::F16))
    }
}

struct Doubles;

impl ModuleMapper for Doubles {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|x| x.cast(burn::tensor::FloatDType::F64))
    }
}
