package digits

import "math"

// weights are whole parameters, or gradients of them, one after the other.
type weights struct{ flat []float32 }

func newWeights() *weights { return &weights{flat: make([]float32, weightCount)} }

// of returns the part of w that belongs to s.
func (w *weights) of(s spec) []float32 { return w.flat[s.offset : s.offset+s.size()] }

// forward computes the hidden layer and the logits.
func (w *weights) forward(pixels *[inputs]float32, h *[hidden]float32, logits *[classes]float32) {
	weight, bias := w.of(layer1Weight), w.of(layer1Bias)
	for j := range h {
		sum := bias[j]
		for i, v := range weight[j*inputs : (j+1)*inputs] {
			sum += v * pixels[i]
		}
		h[j] = float32(math.Tanh(float64(sum)))
	}
	weight, bias = w.of(layer2Weight), w.of(layer2Bias)
	for k := range logits {
		sum := bias[k]
		for j, v := range weight[k*hidden : (k+1)*hidden] {
			sum += v * h[j]
		}
		logits[k] = sum
	}
}

// backward adds the gradient of one sample's loss to grad and returns the loss.
func (w *weights) backward(pixels *[inputs]float32, label int, grad *weights) float64 {
	var h [hidden]float32
	var delta [classes]float32
	w.forward(pixels, &h, &delta)
	loss := softmax(&delta, label)
	delta[label]--

	var back [hidden]float32
	weight, gradWeight, gradBias := w.of(layer2Weight), grad.of(layer2Weight), grad.of(layer2Bias)
	for k, d := range delta {
		gradBias[k] += d
		row, gradRow := weight[k*hidden:(k+1)*hidden], gradWeight[k*hidden:(k+1)*hidden]
		for j := range back {
			gradRow[j] += d * h[j]
			back[j] += d * row[j]
		}
	}
	gradWeight, gradBias = grad.of(layer1Weight), grad.of(layer1Bias)
	for j := range back {
		d := back[j] * (1 - h[j]*h[j])
		gradBias[j] += d
		gradRow := gradWeight[j*inputs : (j+1)*inputs]
		for i, p := range pixels {
			gradRow[i] += d * p
		}
	}
	return loss
}

// softmax turns logits into probabilities and returns the loss of label.
func softmax(logits *[classes]float32, label int) float64 {
	top := logits[0]
	for _, v := range logits {
		top = max(top, v)
	}
	own := float64(logits[label] - top)
	var exps [classes]float64
	sum := 0.0
	for k, v := range logits {
		exps[k] = math.Exp(float64(v - top))
		sum += exps[k]
	}
	for k := range logits {
		logits[k] = float32(exps[k] / sum)
	}
	return math.Log(sum) - own
}

// classify returns the most likely label, the lowest one on ties.
func (w *weights) classify(pixels *[inputs]float32) int {
	var h [hidden]float32
	var logits [classes]float32
	w.forward(pixels, &h, &logits)
	best := 0
	for k, v := range logits {
		if v > logits[best] {
			best = k
		}
	}
	return best
}
