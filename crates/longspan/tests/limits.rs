//! What callers may bring at the edges: states of other models, errors in the middle, masks twice, frozen parts, sizes that no machine has.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Distribution, Int, Tensor, TensorData};
use longspan::attention::{AttentionConfig, AttentionMask, AttentionState, MultiHeadAttentionConfig};
use longspan::layers::clip_gradients;
use longspan::models::{BlockConfig, LanguageModel, LanguageModelConfig, LanguageState};

fn model(attention: &[&str], device: &Device) -> LanguageModel {
    let attention: Vec<AttentionConfig> = attention.iter().map(|text| serde_json::from_str(text).unwrap()).collect();
    let block = BlockConfig::new().with_d_model(16).with_d_ff(32).with_heads(4).with_dropout(0.0);
    let layers = attention.len();
    let config = LanguageModelConfig::new(11).with_block(block).with_layers(layers).with_attention(attention);
    config.init(device).unwrap()
}

const SHAW: &str = r#"{"mechanism": "shaw"}"#;
const SOFTMAX: &str = r#"{"mechanism": "softmax"}"#;

fn numbers<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data().try_to_vec().unwrap()
}

fn tokens<const N: usize>(batch: usize, ids: [i64; N]) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new(ids.to_vec(), [batch, N / batch]), &Device::flex())
}

/// A position beyond a table is refused by the second block: the first must not have moved on.
#[test]
fn an_error_in_a_later_block_leaves_the_whole_state_as_it_was() {
    let model = model(&[SHAW, r#"{"mechanism": "aft-local", "window": 2, "length": 3}"#], &Device::flex());
    let mut state = LanguageState::default();
    model.advance(tokens(1, [1, 2, 3]), &mut state).unwrap();
    let before = model.store(&state).unwrap();
    assert!(model.step(&[4], &mut state).is_err());
    assert!(model.advance(tokens(1, [4, 5]), &mut state).is_err());
    assert_eq!((model.store(&state).unwrap(), state.position()), (before, 3));
}

#[test]
fn a_state_of_another_batch_is_refused_and_kept() {
    let model = model(&[SOFTMAX], &Device::flex());
    let mut state = LanguageState::default();
    model.advance(tokens(2, [1, 2, 3, 4]), &mut state).unwrap();
    let before = model.store(&state).unwrap();
    let error = model.advance(tokens(1, [5, 6]), &mut state).unwrap_err().to_string();
    assert!(error.contains("state: expected keys and values such as [1,"), "{error}");
    assert_eq!(model.store(&state).unwrap(), before);
}

#[test]
fn states_of_other_models_are_refused() {
    let device = Device::flex();
    let (three, two) = (model(&[SHAW, SHAW, SHAW], &device), model(&[SHAW, SHAW], &device));
    let mut state = LanguageState::default();
    three.advance(tokens(1, [1, 2]), &mut state).unwrap();
    let stored = three.store(&state).unwrap();
    assert!(two.restore(&stored, 2).unwrap_err().to_string().contains("those of 2 blocks"));
    assert!(three.restore(&stored, 2).is_ok());

    // 4 heads of 4 numbers, and 2 heads of 8.
    let heads = |heads| MultiHeadAttentionConfig::new(16, heads).init(&device).unwrap();
    let (four, two) = (heads(4), heads(2));
    let x = Tensor::<3>::random([1, 1, 16], Distribution::Default, &device);
    let mut state = AttentionState::default();
    four.step(x.clone(), &mut state).unwrap();
    let stored = four.attention.store(&state).unwrap();
    assert!(two.step(x.clone(), &mut state).unwrap_err().to_string().contains("2 key/value heads"));
    assert!(two.attention.restore(&stored, &device).unwrap_err().to_string().contains("2 key/value heads"));
    assert!(four.step(x, &mut state).is_ok());
}

#[test]
fn freezing_stops_dropout() {
    let device = Device::flex().autodiff();
    let config = BlockConfig::new().with_d_model(16).with_d_ff(32).with_dropout(0.5);
    let block = config.encoder(&AttentionConfig::kernelized(), &device).unwrap();
    let x = Tensor::<3>::random([1, 5, 16], Distribution::Default, &device);
    let run =
        |block: &longspan::models::EncoderBlock| numbers(block.forward(x.clone(), &AttentionMask::causal()).unwrap());
    assert_ne!(run(&block), run(&block));
    let frozen = block.freeze();
    assert_eq!(run(&frozen), run(&frozen));
    let model = LanguageModelConfig::new(11).with_block(config).init(&device).unwrap().freeze();
    let ids = Tensor::<2, Int>::from_data(TensorData::new(vec![1i64, 2, 3], [1, 3]), &device);
    let run = || numbers(model.forward(ids.clone()).unwrap());
    assert_eq!(run(), run());
}

#[test]
fn a_second_key_mask_joins_the_first() {
    let device = Device::flex();
    let attention = MultiHeadAttentionConfig::new(8, 2).init(&device).unwrap();
    let x = Tensor::<3>::random([2, 4, 8], Distribution::Default, &device);
    let run = |mask: &AttentionMask| attention.self_attention(x.clone(), mask).map(numbers);
    let padding = [true, false, false, false, false, false, false, false];
    let both = [true, false, false, true, false, false, true, true];
    let mask = AttentionMask::causal;
    let expected = run(&mask().with_padding(&both)).unwrap();
    assert_eq!(run(&mask().with_lengths(&[3, 2]).with_padding(&padding)).unwrap(), expected);
    assert_eq!(run(&mask().with_padding(&padding).with_lengths(&[3, 2])).unwrap(), expected);
    assert_eq!(
        run(&mask().with_lengths(&[3, 4]).with_lengths(&[4, 2])).unwrap(),
        run(&mask().with_lengths(&[3, 2])).unwrap()
    );
    // What has no meaning together is refused.
    assert!(run(&mask().with_padding(&padding).with_lengths(&[3, 2, 1])).is_err());
    assert!(run(&mask().with_lengths(&[3, 2]).with_packed(&[4])).is_err());
}

#[test]
fn a_limit_that_turns_gradients_round_is_refused() {
    let device = Device::flex().autodiff();
    let linear = burn::nn::LinearConfig::new(2, 2).init(&device);
    let x = Tensor::<2>::ones([1, 2], &device);
    let mut gradients = GradientsParams::from_grads(linear.forward(x).sum().backward(), &linear);
    for limit in [-1.0, f64::NAN] {
        assert!(clip_gradients(&linear, &mut gradients, limit).is_err(), "{limit}");
    }
    assert!(clip_gradients(&linear, &mut gradients, 0.5).unwrap() > 0.5);
}

#[test]
fn tables_that_no_machine_holds_are_refused() {
    let config = |radius: usize| format!(r#"{{"mechanism": "shaw", "relative": {{"radius": {radius}}}}}"#);
    for radius in [usize::MAX, usize::MAX / 64] {
        let config: AttentionConfig = serde_json::from_str(&config(radius)).unwrap();
        let error = MultiHeadAttentionConfig::new(16, 4).with_attention(config).init(&Device::flex()).unwrap_err();
        assert!(error.to_string().contains("radius"), "{error}");
    }
}
