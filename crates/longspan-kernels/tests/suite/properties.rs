//! Properties over arbitrary calls, shrunk to the smallest that breaks one: a call that makes sense gives what the
//! definition gives, whatever its sizes, mask and strides; one that makes none gives an error and nothing else.

use longspan_kernels::aft::Variant;
use longspan_kernels::{
    Aft, Algorithm, Bias, Call, Cotangent, Dims, FeatureMap, Gradients, Kernel, KernelizedAttention, Keys, Mask, Order,
    Output, Score, Scratch, Shaw, ShortConvolution, SoftmaxAttention, State, Toeplitz, Token, View, ViewMut,
};
use longspan_testing::random::Random;
use longspan_testing::{Assumptions, Case, Failure, KeyMask, Subject, accuracy, execute, memory};
use proptest::prelude::*;

/// Cases for each property: together they take a few seconds.
const CASES: u32 = 400;

fn config() -> ProptestConfig {
    // Failures are told with the smallest case and its seed; files of old seeds beside the tests would say no more.
    ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() }
}

/// Kernelized attention with any options.
fn kernelized() -> impl Strategy<Value = KernelizedAttention> {
    let score = prop_oneof![
        Just(Score::Content),
        (0usize..9).prop_map(|radius| Score::Relative(Shaw::new(radius))),
        (0usize..9).prop_map(|radius| Score::Combined(Shaw::new(radius))),
    ];
    let algorithm = prop_oneof![Just(Algorithm::Auto), Just(Algorithm::Naive), Just(Algorithm::Chunked)];
    let map = prop_oneof![
        Just(FeatureMap::EluPlusOne),
        Just(FeatureMap::Relu),
        Just(FeatureMap::Softplus),
        Just(FeatureMap::Exp)
    ];
    (score, algorithm, map, any::<bool>()).prop_map(|(score, algorithm, feature_map, normalize)| KernelizedAttention {
        feature_map,
        score,
        decay: None,
        gate: false,
        normalize,
        algorithm,
    })
}

fn dims() -> impl Strategy<Value = Dims> {
    let lengths = || prop_oneof![3 => 0usize..20, 1 => 60usize..70];
    (0usize..3, 0usize..3, 1usize..3, lengths(), lengths(), 1usize..20, 1usize..20).prop_map(
        |(batch, group, kv_heads, queries, keys, head_dim, value_dim)| Dims {
            batch,
            heads: group * kv_heads,
            kv_heads,
            queries,
            keys,
            head_dim,
            value_dim,
        },
    )
}

/// Ascending boundaries from 0 to `tokens`.
fn bounds(tokens: usize, sequences: usize) -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(0..=tokens, sequences).prop_map(move |mut inner| {
        inner.sort_unstable();
        std::iter::once(0).chain(inner).chain([tokens]).collect()
    })
}

/// A call that makes sense.
fn case() -> impl Strategy<Value = Case> {
    let keys = |dims: Dims| {
        prop_oneof![
            Just(KeyMask::All),
            prop::collection::vec(0..=dims.keys, dims.batch).prop_map(KeyMask::Lengths),
            prop::collection::vec(any::<bool>(), dims.batch * dims.keys).prop_map(KeyMask::Padding),
            (0usize..4)
                .prop_flat_map(move |n| (bounds(dims.queries, n), bounds(dims.keys, n)))
                .prop_map(|(queries, keys)| KeyMask::Packed { queries, keys }),
        ]
    };
    let offset = prop_oneof![4 => -30isize..30, 1 => Just(isize::MAX / 4), 1 => Just(-(isize::MAX / 4))];
    (dims().prop_flat_map(move |dims| (Just(dims), keys(dims))), any::<bool>(), offset, any::<u64>()).prop_map(
        |((dims, keys), causal, offset, seed)| {
            let packed = matches!(keys, KeyMask::Packed { .. });
            let dims = Dims { batch: if packed { 1 } else { dims.batch }, ..dims };
            Case { dims, causal, offset, keys, positive: false, seed }
        },
    )
}

fn softmax() -> Subject {
    let assumptions = Assumptions { content: true, positive_weights: true, ..Default::default() };
    Subject::new(SoftmaxAttention { capacity: 10, ..Default::default() }, assumptions)
}

fn is_definition(subject: &Subject, case: &Case) -> Result<(), Failure> {
    accuracy::forward::<f32>(subject, case)?;
    accuracy::forward::<f64>(subject, case)
}

fn failed(failure: Failure) -> TestCaseError {
    TestCaseError::fail(failure.0)
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn kernelized_attention_is_its_definition(attention in kernelized(), case in case()) {
        is_definition(&Subject::kernelized(&attention), &case).map_err(failed)?;
    }

    #[test]
    fn softmax_attention_is_its_definition(case in case()) {
        is_definition(&softmax(), &case).map_err(failed)?;
    }

    #[test]
    fn strides_do_not_matter(attention in kernelized(), case in case(), baseline in any::<bool>()) {
        let subject = if baseline { softmax() } else { Subject::kernelized(&attention) };
        memory::strides_do_not_matter::<f32>(&subject, &case).map_err(failed)?;
    }

    #[test]
    fn gradients_are_written_and_finite(attention in kernelized(), case in case(), baseline in any::<bool>()) {
        let subject = if baseline { softmax() } else { Subject::kernelized(&attention) };
        let inputs = execute::random(&subject, &case).cast::<f32>();
        let (_, back) = execute::both(&subject, &case, &inputs).map_err(Failure::from).map_err(failed)?;
        prop_assert!(back.gradients.iter().flatten().all(|x| x.is_finite()));
    }
}

proptest! {
    // Most are refused at once, so there may be more of them.
    #![proptest_config(ProptestConfig { cases: 20 * CASES, ..config() })]

    #[test]
    fn whatever_is_wrong_gives_an_error_and_no_panic(which in 0usize..WRONG, call in any_call()) {
        let outcome = run(mechanism(which).as_ref(), &call);
        prop_assert!(outcome.is_ok(), "{}", outcome.unwrap_err());
    }
}

/// Mechanisms for calls that need not make sense.
const WRONG: usize = 10;

fn mechanism(which: usize) -> Box<dyn Kernel<f32>> {
    let shaw = Score::Combined(Shaw::new(2));
    match which {
        0 => Box::new(KernelizedAttention::default()),
        1 => Box::new(KernelizedAttention { score: shaw, algorithm: Algorithm::Naive, ..Default::default() }),
        2 => Box::new(KernelizedAttention { score: shaw, algorithm: Algorithm::Chunked, ..Default::default() }),
        3 => {
            Box::new(KernelizedAttention { decay: Some(vec![0.9]), algorithm: Algorithm::Tiled, ..Default::default() })
        }
        4 => Box::new(KernelizedAttention { score: shaw, decay: Some(vec![0.9, 0.8]), ..Default::default() }),
        5 => Box::new(SoftmaxAttention { capacity: 5, ..Default::default() }),
        6 => Box::new(Toeplitz::new(Bias::clipped(3))),
        7 => Box::new(SoftmaxAttention { window: Some(3), ..Default::default() }),
        8 => Box::new(ShortConvolution::default()),
        _ => Box::new(Aft::new(Variant::Local { window: 2, length: None })),
    }
}

/// A call with nothing in it that needs to fit.
#[derive(Debug, Clone)]
struct AnyCall {
    dims: Dims,
    /// Numbers in q, k, v, d_out, out, the denominators and one parameter.
    lens: [usize; 7],
    strides: [[usize; 3]; 3],
    parameters: usize,
    causal: bool,
    offset: isize,
    kind: usize,
    bounds: Vec<usize>,
    ignored: Vec<bool>,
    /// The numbers of a state, and whether its shape is that of the call.
    state: Option<(bool, Vec<f32>)>,
}

fn any_call() -> impl Strategy<Value = AnyCall> {
    let size = |least: usize| prop_oneof![12 => least..6, 1 => Just(usize::MAX), 1 => Just(1usize << 40)];
    let dims = (0usize..3, 0usize..5, 0usize..3, size(0), size(0), size(1), 0usize..5).prop_map(
        |(batch, heads, kv_heads, queries, keys, head_dim, value_dim)| Dims {
            batch,
            heads,
            kv_heads,
            queries,
            keys,
            head_dim,
            value_dim,
        },
    );
    // What fits is likely enough that every step of the checks is reached.
    let len = || prop_oneof![1 => 0usize..100, 3 => Just(4000usize)];
    let stride = || prop_oneof![6 => 1usize..40, 1 => Just(usize::MAX), 1 => Just(usize::MAX / 2)];
    let number =
        prop_oneof![4 => -3f32..3.0, 1 => Just(f32::NAN), 1 => Just(f32::INFINITY), 1 => Just(1e30), 1 => Just(2.5)];
    (
        (dims, prop::array::uniform7(len()), prop::array::uniform3(prop::array::uniform3(stride())), 0usize..3),
        (any::<bool>(), prop_oneof![5 => -5isize..5, 1 => any::<isize>()], 0usize..4),
        (prop::collection::vec(0usize..8, 0..5), prop::collection::vec(any::<bool>(), 0..30)),
        prop::option::of((any::<bool>(), prop::collection::vec(number, 0..40))),
    )
        .prop_map(|((dims, lens, strides, parameters), (causal, offset, kind), (bounds, ignored), state)| {
            AnyCall { dims, lens, strides, parameters, causal, offset, kind, bounds, ignored, state }
        })
}

/// Runs everything that a mechanism has. What `check` refuses must be refused by `forward` too, with nothing written.
fn run(mechanism: &dyn Kernel<f32>, call: &AnyCall) -> Result<(), String> {
    const MARK: f32 = 7.25;
    let AnyCall { dims, lens, strides, .. } = call;
    let numbers = lens.map(|len| vec![0.5f32; len]);
    let parameters = vec![numbers[6].as_slice(); call.parameters];
    let keys = match call.kind {
        0 => Keys::All,
        1 => Keys::Lengths(&call.bounds),
        2 => Keys::Padding(&call.ignored),
        _ => Keys::Packed { queries: &call.bounds, keys: &call.bounds },
    };
    let order = if call.causal { Order::Causal } else { Order::Bidirectional };
    let state = call.state.as_ref().and_then(|(fits, numbers)| {
        // Sizes that no state can have are refused where they are asked for.
        let sizes = Dims { queries: 3, keys: 3, head_dim: if dims.head_dim < 10 { dims.head_dim } else { 3 }, ..*dims };
        let empty = mechanism.empty_state(&sizes).ok()?;
        let len = if *fits { empty.numbers().len() } else { numbers.len() };
        let all = numbers.iter().copied().cycle().take(if numbers.is_empty() { 0 } else { len }).collect();
        State::from_numbers(empty.shape(), all).ok()
    });
    let made = Call::new(
        *dims,
        View::strided(&numbers[0], strides[0]),
        View::strided(&numbers[1], strides[1]),
        View::strided(&numbers[2], strides[2]),
    )
    .with_parameters(&parameters)
    .with_mask(Mask { order, offset: call.offset, keys })
    .with_initial_state(state.as_ref());
    let checked = mechanism.check(&made);
    let (mut out, mut denominators) = (vec![MARK; lens[4]], vec![MARK; lens[5]]);
    denominators.truncate(mechanism.denominators(dims).into_iter().fold(1, usize::saturating_mul));
    let width = dims.value_dim;
    let row = dims.queries.saturating_mul(width);
    let contiguous = [dims.heads.saturating_mul(row), row, width];
    let output = Output::training(ViewMut::strided(&mut out, contiguous), &mut denominators);
    let forward = mechanism.forward(&made, output, &mut Scratch::new());
    if let Err(error) = &checked
        && forward.is_ok()
    {
        return Err(format!("forward took what check refuses: {error}"));
    }
    if forward.is_err() && out.iter().chain(&denominators).any(|&x| x != MARK) {
        return Err(format!("written before the error {forward:?}"));
    }
    let (mut dq, mut dk, mut dv) = (vec![MARK; lens[0]], vec![MARK; lens[1]], vec![MARK; lens[2]]);
    let mut d_parameters = vec![vec![MARK; lens[6]]; call.parameters];
    let mut slices: Vec<&mut [f32]> = d_parameters.iter_mut().map(Vec::as_mut_slice).collect();
    let cotangent = Cotangent {
        out: View::strided(&out, contiguous),
        denominators: &denominators,
        d_out: View::strided(&numbers[3], contiguous),
        final_state: None,
    };
    let gradients = Gradients {
        dq: ViewMut::strided(&mut dq, strides[0]),
        dk: ViewMut::strided(&mut dk, strides[1]),
        dv: ViewMut::strided(&mut dv, strides[2]),
        parameters: &mut slices,
        initial_state: None,
    };
    let backward = mechanism.backward(&made, &cotangent, gradients, &mut Scratch::new());
    if backward.is_err() && dq.iter().chain(&dk).chain(&dv).any(|&x| x != MARK) {
        return Err(format!("written before the error {backward:?}"));
    }
    if let Some(mut state) = state {
        let token = Token { q: &numbers[0], k: &numbers[1], v: &numbers[2], parameters: &parameters };
        let _ = mechanism.combine(&state, &state, &[]);
        let before = state.clone();
        let same =
            |state: &State<f32>| state.numbers().iter().zip(before.numbers()).all(|(a, b)| a.to_bits() == b.to_bits());
        if mechanism.step(&token, &mut state, &mut out).is_err() && !same(&state) {
            return Err("a step that was refused wrote to its state".into());
        }
    }
    Ok(())
}

/// Keys that no query head reads have gradients of 0, whatever stood in the memory that a call works with.
#[test]
fn keys_without_query_heads_have_no_gradients() {
    let dims = Dims { batch: 2, heads: 0, kv_heads: 2, queries: 10, keys: 7, head_dim: 13, value_dim: 17 };
    for algorithm in [Algorithm::Naive, Algorithm::Chunked] {
        for score in [Score::Content, Score::Relative(Shaw::new(8)), Score::Combined(Shaw::new(8))] {
            let subject = Subject::kernelized(&KernelizedAttention { algorithm, score, ..Default::default() });
            for (causal, offset) in [(true, 0), (false, 0), (false, 30), (false, -(isize::MAX / 4))] {
                let case = Case { offset, ..Case::new(dims, causal) };
                memory::poison_does_not_matter::<f32>(&subject, &case).unwrap_or_else(|failure| panic!("{failure}"));
                let inputs = execute::random(&subject, &case).cast::<f32>();
                let (_, back) = execute::both(&subject, &case, &inputs).expect("a call that makes sense");
                assert!(back.gradients.iter().flatten().all(|&d| d == 0.0), "{algorithm:?}, offset {offset}");
            }
        }
    }
}

/// Queries and keys that several heads read at one place are those of each of them.
#[test]
fn heads_may_share_queries_and_keys() {
    let dims = Dims { batch: 2, heads: 4, kv_heads: 4, queries: 70, keys: 70, head_dim: 8, value_dim: 5 };
    let mut random = Random::new(5);
    let mut draw =
        |shape: [usize; 4]| -> Vec<f32> { (0..shape.iter().product()).map(|_| random.normal() as f32).collect() };
    let own = Dims { heads: 2, kv_heads: 2, ..dims };
    let (q, k, v) = (draw(own.q()), draw(own.k()), draw(dims.v()));
    let head = dims.queries * dims.head_dim;
    let twice = |x: &[f32]| -> Vec<f32> { x.chunks_exact(head).flat_map(|head| head.repeat(2)).collect() };
    let run = |q: View<'_, f32>, k: View<'_, f32>| {
        let mut out = vec![0.0; dims.out().iter().product()];
        let call = Call::new(dims, q, k, View::contiguous(&v, dims.v())).with_mask(Mask::causal());
        let to = Output::new(ViewMut::contiguous(&mut out, dims.out()));
        KernelizedAttention::default().forward(&call, to, &mut Scratch::new()).map(|()| out)
    };
    let expected = run(View::contiguous(&twice(&q), dims.q()), View::contiguous(&twice(&k), dims.k())).unwrap();
    let shared = |x, shape, sharing| View::contiguous(x, shape).with_shared_heads(sharing);
    assert_eq!(run(shared(&q, own.q(), 2), shared(&k, own.k(), 2)).unwrap(), expected);
    let error = run(shared(&q, own.q(), 3), shared(&k, own.k(), 2)).unwrap_err().to_string();
    assert!(error.contains("q: expected a multiple of the 3"), "{error}");
}
