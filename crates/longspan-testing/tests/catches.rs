//! A check that cannot fail is worthless: each must pass a sound mechanism and catch a mechanism with a fault.

use longspan_kernels::{
    Algorithm, Call, Cotangent, Dims, Error, Gradients, Kernel, KernelizedAttention, Mask, Mechanism, Output,
    Parameters, Plan, Real, Reference, Score, Scratch, Shaw, State, Token, ViewMut,
};
use longspan_testing::suite::{Check, failures};
use longspan_testing::{
    Case, KeyMask, Subject, accuracy, isolation, memory, rejection, state_gradients, streaming, threads,
};

/// What a mechanism may get wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    LastRowSlightlyOff,
    DenominatorsSlightlyOff,
    RowsThatSeeNothingGiveSomething,
    SeesOneKeyOfTheFuture,
    SwallowsNan,
    SpreadsNanToAllRows,
    ReadsPadding,
    ReadsItsOutput,
    ReadsItsGradient,
    CountsThreads,
    WritesBetweenRows,
    TurnsPackedSequencesIntoOne,
    LikesTheFirstKey,
    NoGradientOfParameters,
    GradientOfOneKeyOff,
    GradientOfQueriesOffInF32,
    GradientForUnseenKeys,
    ForgetsTheInitialState,
    IgnoresLengthsInTheState,
    StepsSlightlyOff,
    StateLosesItsRing,
    NoGradientOfTheState,
    GradientOfTheStateSlightlyOff,
    SumsForgetTheEarlierState,
    TakesWrongCalls,
    WritesBeforeItRefuses,
    BlamesAnother,
}
use Fault::*;

/// Kernelized attention with a fault.
#[derive(Debug, Clone)]
struct Broken {
    sound: KernelizedAttention,
    fault: Fault,
}

impl Broken {
    fn sound<T: Real>(&self) -> &dyn Kernel<T>
    where
        KernelizedAttention: Kernel<T>,
    {
        &self.sound
    }

    fn is(&self, fault: Fault) -> bool {
        self.fault == fault
    }

    /// The call that the sound mechanism gets instead.
    fn distort<'a, T: Real>(&self, call: &Call<'a, T>) -> Call<'a, T> {
        let mut call = *call;
        if self.is(SeesOneKeyOfTheFuture) {
            call.mask.offset += 1;
        }
        if self.is(TurnsPackedSequencesIntoOne) && matches!(call.mask.keys, longspan_kernels::Keys::Packed { .. }) {
            call.mask.keys = longspan_kernels::Keys::All;
        }
        if self.is(ForgetsTheInitialState) {
            call.initial_state = Option::None;
        }
        call
    }

    /// What this mechanism makes of an error of the sound one.
    fn refuse(&self, error: Error) -> Result<(), Error> {
        match error {
            _ if self.is(TakesWrongCalls) => Ok(()),
            Error::Argument { argument, expected, got, .. } if self.is(BlamesAnother) => {
                Err(Error::Argument { operation: "another", argument, expected, got })
            }
            error => Err(error),
        }
    }
}

/// Row-major numbers of a tensor to be written.
fn read<T: Real>(view: &mut ViewMut<'_, T>, shape: [usize; 4]) -> Vec<T> {
    let mut numbers = Vec::new();
    for (b, h, t) in tokens(shape) {
        numbers.extend_from_slice(view.token(b, h, t, shape[3]));
    }
    numbers
}

fn write<T: Real>(view: &mut ViewMut<'_, T>, shape: [usize; 4], numbers: &[T]) {
    for (n, (b, h, t)) in tokens(shape).enumerate() {
        view.token(b, h, t, shape[3]).copy_from_slice(&numbers[n * shape[3]..][..shape[3]]);
    }
}

fn tokens(shape: [usize; 4]) -> impl Iterator<Item = (usize, usize, usize)> {
    let [batch, heads, tokens, _] = shape;
    (0..batch).flat_map(move |b| (0..heads).flat_map(move |h| (0..tokens).map(move |t| (b, h, t))))
}

/// A little more than rounding in either number type.
fn slightly<T: Real>() -> T {
    T::from_f64(1.0 + if size_of::<T>() == 4 { 1e-3 } else { 1e-9 })
}

impl Mechanism for Broken {
    fn name(&self) -> &'static str {
        self.sound.name()
    }

    fn algorithms(&self) -> &'static [Algorithm] {
        self.sound.algorithms()
    }

    fn parameters(&self, dims: &Dims) -> Parameters {
        self.sound.parameters(dims)
    }

    fn plan(&self, dims: &Dims, mask: &Mask<'_>) -> Result<Plan, Error> {
        self.sound.plan(dims, mask)
    }

    fn reference(&self, call: &Call<'_, f64>) -> Result<Reference, Error> {
        self.sound.reference(call)
    }
}

impl<T: Real> Kernel<T> for Broken
where
    KernelizedAttention: Kernel<T>,
{
    fn check(&self, call: &Call<'_, T>) -> Result<(), Error> {
        self.sound::<T>().check(call).or_else(|error| self.refuse(error))
    }

    fn forward(&self, call: &Call<'_, T>, mut output: Output<'_, T>, scratch: &mut Scratch<T>) -> Result<(), Error> {
        let refused = self.check(call).is_err() || self.sound::<T>().check(call).is_err();
        if refused && self.is(WritesBeforeItRefuses) && call.dims.queries == 5 {
            output.out.token(0, 0, 0, 1)[0] = T::ZERO;
        }
        if refused || matches!(self.fault, None | TakesWrongCalls | WritesBeforeItRefuses | BlamesAnother) {
            return self.sound::<T>().forward(call, output, scratch).or_else(|error| self.refuse(error));
        }
        let Output { mut out, denominators, final_state, .. } = output;
        let dims = call.dims;
        let before = read(&mut out, dims.out());
        let mut own = vec![T::ZERO; before.len()];
        let mut own_denominators = vec![T::ZERO; dims.batch * dims.heads * dims.queries];
        let mut distorted = self.distort(call);
        let mut own_state = final_state.as_ref().map(|state| State::clone(state));
        let output = Output::training(ViewMut::contiguous(&mut own, dims.out()), &mut own_denominators)
            .with_final_state(own_state.as_mut());
        self.sound::<T>().forward(&distorted, output, scratch)?;

        let width = dims.value_dim;
        let last = own.len().saturating_sub(width);
        match self.fault {
            LastRowSlightlyOff => own[last..].iter_mut().for_each(|x| *x *= slightly()),
            DenominatorsSlightlyOff => own_denominators.iter_mut().for_each(|x| *x *= slightly()),
            RowsThatSeeNothingGiveSomething => {
                own.iter_mut().filter(|x| **x == T::ZERO).for_each(|x| *x = T::from_f64(1e-30));
            }
            SwallowsNan => own.iter_mut().filter(|x| !x.is_finite()).for_each(|x| *x = T::ZERO),
            SpreadsNanToAllRows if own.iter().any(|x| !x.is_finite()) => own.fill(T::from_f64(f64::NAN)),
            ReadsPadding if dims.keys > 0 => {
                for j in 0..dims.keys {
                    own[0] += T::ZERO * call.v.token(0, 0, j, width)[0];
                }
            }
            ReadsItsOutput => own[last] += T::ZERO * before[last],
            CountsThreads => {
                own[last] *= T::ONE + T::EPSILON * T::from_f64(rayon::current_num_threads() as f64);
            }
            LikesTheFirstKey => own[last] += call.v.token(0, 0, 0, width)[0] * (slightly::<T>() - T::ONE),
            _ => {}
        }
        write(&mut out, dims.out(), &own);
        if self.is(WritesBetweenRows) {
            out.token(0, 0, 0, width + 1)[width] = T::ZERO;
        }
        if let Some(denominators) = denominators {
            denominators.copy_from_slice(&own_denominators);
        }
        if let (Some(state), Some(mut own_state)) = (final_state, own_state) {
            if self.is(IgnoresLengthsInTheState) {
                distorted.mask.keys = longspan_kernels::Keys::All;
                let output = Output::new(ViewMut::contiguous(&mut own, dims.out())).with_final_state(&mut own_state);
                self.sound::<T>().forward(&distorted, output, scratch)?;
            }
            if self.is(StateLosesItsRing) {
                let mut numbers = own_state.numbers().to_vec();
                let last = numbers.len().saturating_sub(1);
                numbers[last..].fill(T::ZERO);
                own_state = State::from_numbers(own_state.shape(), numbers)?;
            }
            *state = own_state;
        }
        Ok(())
    }

    fn backward(
        &self,
        call: &Call<'_, T>,
        cotangent: &Cotangent<'_, T>,
        gradients: Gradients<'_, '_, T>,
        scratch: &mut Scratch<T>,
    ) -> Result<(), Error> {
        let dims = call.dims;
        let Gradients { mut dq, mut dk, mut dv, parameters, mut initial_state } = gradients;
        let checked = self.sound::<T>().check(call).is_ok();
        let before = if checked && dims.queries > 0 && dims.heads > 0 && dims.batch > 0 {
            dq.token(0, 0, 0, 1)[0]
        } else {
            T::ZERO
        };
        let mut own =
            [dims.q(), dims.k(), dims.v()].map(|shape| vec![T::ZERO; if checked { shape.iter().product() } else { 0 }]);
        if !checked || matches!(self.fault, None | TakesWrongCalls | WritesBeforeItRefuses | BlamesAnother) {
            let gradients = Gradients { dq, dk, dv, parameters, initial_state };
            let result = self.sound::<T>().backward(call, cotangent, gradients, scratch);
            return result.or_else(|error| self.refuse(error));
        }
        let [own_q, own_k, own_v] = &mut own;
        let mut own_parameters: Vec<&mut [T]> = parameters.iter_mut().map(|p| &mut **p).collect();
        let own_gradients = Gradients {
            dq: ViewMut::contiguous(own_q, dims.q()),
            dk: ViewMut::contiguous(own_k, dims.k()),
            dv: ViewMut::contiguous(own_v, dims.v()),
            parameters: &mut own_parameters,
            initial_state: initial_state.as_deref_mut(),
        };
        self.sound::<T>().backward(&self.distort(call), cotangent, own_gradients, scratch)?;
        match self.fault {
            NoGradientOfParameters => parameters.iter_mut().for_each(|p| p.fill(T::ZERO)),
            GradientOfOneKeyOff if !own_k.is_empty() => own_k[0] *= T::from_f64(1.01),
            GradientOfQueriesOffInF32 if size_of::<T>() == 4 => {
                own_q.iter_mut().for_each(|x| *x *= slightly());
            }
            GradientForUnseenKeys => {
                own_v.iter_mut().filter(|x| **x == T::ZERO).for_each(|x| *x = T::from_f64(1e-30));
            }
            ReadsItsGradient if !own_q.is_empty() => own_q[0] += T::ZERO * before,
            _ => {}
        }
        if let (Some(state), NoGradientOfTheState | GradientOfTheStateSlightlyOff) = (initial_state, self.fault) {
            let factor = if self.is(NoGradientOfTheState) { T::ZERO } else { slightly::<T>() * slightly() };
            let numbers = state.numbers().iter().map(|&x| x * factor).collect();
            *state = State::from_numbers(state.shape(), numbers)?;
        }
        write(&mut dq, dims.q(), own_q);
        write(&mut dk, dims.k(), own_k);
        write(&mut dv, dims.v(), own_v);
        Ok(())
    }

    fn empty_state(&self, dims: &Dims) -> Result<State<T>, Error> {
        self.sound::<T>().empty_state(dims)
    }

    fn combine(&self, earlier: &State<T>, later: &State<T>, parameters: &[&[T]]) -> Result<State<T>, Error> {
        let sum = self.sound::<T>().combine(earlier, later, parameters);
        if self.is(SumsForgetTheEarlierState) { Ok(later.clone()) } else { sum }
    }

    fn step(&self, token: &Token<'_, T>, state: &mut State<T>, out: &mut [T]) -> Result<(), Error> {
        self.sound::<T>().step(token, state, out)?;
        if self.is(StepsSlightlyOff) {
            out.iter_mut().for_each(|x| *x *= slightly());
        }
        Ok(())
    }
}

/// A case with everything in it that a fault needs to show.
fn case(keys: KeyMask, causal: bool) -> Case {
    let batch = if matches!(keys, KeyMask::Packed { .. }) { 1 } else { 2 };
    let dims = Dims { batch, heads: 2, kv_heads: 2, queries: 9, keys: 9, head_dim: 3, value_dim: 2 };
    Case { keys, ..Case::new(dims, causal) }
}

fn caught(fault: Fault, score: Score, check: Check, case: &Case) -> bool {
    let sound = KernelizedAttention { score, ..Default::default() };
    let subject = Subject::new(Broken { sound: sound.clone(), fault }, Subject::assume(&sound));
    let (total, failures) = failures([case], |_| subject.label.clone(), |case| check(&subject, case));
    assert_eq!(total, 1);
    if fault == None {
        assert!(failures.is_empty(), "a sound mechanism fails: {}", failures[0]);
    }
    assert!(failures.iter().all(|f| !f.contains("panicked")), "{fault:?}: {}", failures[0]);
    !failures.is_empty()
}

#[track_caller]
fn catches(score: Score, check: Check, case: Case, faults: &[Fault]) {
    caught(None, score, check, &case);
    for &fault in faults {
        assert!(caught(fault, score, check, &case), "{fault:?} was not caught");
    }
}

const CONTENT: Score = Score::Content;

fn shaw() -> Score {
    Score::Combined(Shaw::new(2))
}

/// Keys 1, 4 and 8 of either batch entry are ignored.
fn some_padding() -> KeyMask {
    KeyMask::Padding((0..18).map(|n| [1, 4, 8].contains(&(n % 9))).collect())
}

#[test]
fn errors_of_the_forward_pass_are_caught() {
    let faults = [LastRowSlightlyOff, DenominatorsSlightlyOff, SeesOneKeyOfTheFuture, LikesTheFirstKey];
    catches(CONTENT, accuracy::forward::<f32>, case(KeyMask::All, true), &faults);
    catches(shaw(), accuracy::forward::<f64>, case(KeyMask::All, true), &faults);
    let blind = case(KeyMask::Lengths(vec![0, 5]), true);
    catches(CONTENT, accuracy::forward::<f32>, blind, &[RowsThatSeeNothingGiveSomething]);
}

#[test]
fn errors_of_the_backward_pass_are_caught() {
    let in_f64 = [NoGradientOfParameters, GradientOfOneKeyOff, SeesOneKeyOfTheFuture, GradientForUnseenKeys];
    catches(shaw(), accuracy::gradient, case(some_padding(), true), &in_f64);
    let in_f32 = [GradientOfQueriesOffInF32, GradientForUnseenKeys];
    catches(shaw(), accuracy::gradient_in_f32, case(some_padding(), true), &in_f32);
}

#[test]
fn leaks_are_caught() {
    let faults = [SeesOneKeyOfTheFuture, SwallowsNan, SpreadsNanToAllRows];
    catches(CONTENT, isolation::unseen_keys_do_not_matter::<f32>, case(KeyMask::All, true), &faults);
    catches(shaw(), isolation::rows_are_independent::<f32>, case(KeyMask::All, true), &[SpreadsNanToAllRows]);
    let check = isolation::padding_does_not_matter::<f32>;
    catches(CONTENT, check, case(some_padding(), true), &[ReadsPadding, GradientForUnseenKeys]);
    let packed = KeyMask::Packed { queries: vec![0, 4, 9], keys: vec![0, 6, 9] };
    let check = isolation::packed_is_looped::<f32>;
    catches(CONTENT, check, case(packed, true), &[TurnsPackedSequencesIntoOne, LastRowSlightlyOff]);
    let check = isolation::order_does_not_matter_without_positions::<f32>;
    catches(CONTENT, check, case(KeyMask::All, false), &[LikesTheFirstKey]);
}

#[test]
fn careless_use_of_memory_is_caught() {
    let faults = [ReadsItsOutput, ReadsItsGradient];
    catches(CONTENT, memory::poison_does_not_matter::<f32>, case(KeyMask::All, true), &faults);
    catches(shaw(), memory::strides_do_not_matter::<f32>, case(KeyMask::All, true), &[WritesBetweenRows]);
    catches(shaw(), threads::threads_do_not_matter::<f32>, case(KeyMask::All, true), &[CountsThreads]);
}

#[test]
fn errors_of_states_are_caught() {
    let faults = [ForgetsTheInitialState, StepsSlightlyOff, StateLosesItsRing];
    catches(shaw(), streaming::pieces_make_the_whole::<f32>, case(KeyMask::All, true), &faults);
    let check = streaming::ignored_keys_keep_their_place::<f32>;
    catches(shaw(), check, case(KeyMask::All, true), &[ForgetsTheInitialState, StateLosesItsRing]);
    let check = streaming::lengths_end_the_sequence::<f32>;
    catches(shaw(), check, case(KeyMask::All, true), &[IgnoresLengthsInTheState]);
    let check = streaming::states_add_up::<f32>;
    catches(shaw(), check, pieces(), &[StateLosesItsRing, SumsForgetTheEarlierState]);
}

/// Long enough to be cut into several pieces.
fn pieces() -> Case {
    let case = case(KeyMask::All, true);
    Case { dims: Dims { queries: 200, keys: 200, ..case.dims }, ..case }
}

#[test]
fn errors_of_state_gradients_are_caught() {
    let faults = [NoGradientOfTheState, GradientOfTheStateSlightlyOff, ForgetsTheInitialState];
    catches(shaw(), state_gradients::gradients_pass_through_states::<f32>, pieces(), &faults);
    let check = state_gradients::state_gradients_are_difference_quotients;
    // A seed that draws an initial state of several tokens.
    let drawn = Case { seed: 2, ..case(KeyMask::All, true) };
    catches(shaw(), check, drawn, &[NoGradientOfTheState, GradientOfOneKeyOff]);
}

#[test]
fn wrong_calls_that_are_taken_are_caught() {
    let faults = [TakesWrongCalls, WritesBeforeItRefuses, BlamesAnother];
    catches(shaw(), rejection::wrong_calls::<f32>, Case::new(rejection::dims([3, 2]), true), &faults);
}
