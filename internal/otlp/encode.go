package otlp

import (
	"strings"
	"time"

	collector "go.opentelemetry.io/proto/slim/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/slim/otlp/common/v1"
	resource "go.opentelemetry.io/proto/slim/otlp/resource/v1"
	otlptrace "go.opentelemetry.io/proto/slim/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/ckptstore/ckptstore/internal/traces"
)

// scopeName is the name of what makes the spans.
const scopeName = "github.com/ckptstore/ckptstore"

// encode returns a trace as an ExportTraceServiceRequest.
func (t *Tracer) encode(tr traces.Trace) ([]byte, error) {
	spans := make([]*otlptrace.Span, len(tr.Spans))
	for i := range tr.Spans {
		spans[i] = spanOf(tr.ID, &tr.Spans[i])
	}
	of := []traces.Attribute{
		{Key: "service.name", Value: t.config.Service},
		{Key: "service.version", Value: t.options.Version},
		{Key: "ckptstore.store", Value: t.store.ID},
	}
	for _, key := range t.config.attributes() {
		if key != "service.version" || t.options.Version == "" {
			of = append(of, traces.Attribute{Key: key, Value: t.config.Attributes[key]})
		}
	}
	return proto.Marshal(&collector.ExportTraceServiceRequest{ResourceSpans: []*otlptrace.ResourceSpans{{
		Resource: &resource.Resource{Attributes: attributesOf(of)},
		ScopeSpans: []*otlptrace.ScopeSpans{{
			Scope: &common.InstrumentationScope{Name: scopeName, Version: t.options.Version},
			Spans: spans,
		}},
	}}})
}

func spanOf(trace [16]byte, s *traces.Span) *otlptrace.Span {
	out := &otlptrace.Span{
		TraceId: trace[:], SpanId: s.ID[:], Name: s.Name, Kind: otlptrace.Span_SPAN_KIND_INTERNAL,
		StartTimeUnixNano: nano(s.From), EndTimeUnixNano: nano(s.Until), Attributes: attributesOf(s.Attributes),
	}
	if s.Parent != ([8]byte{}) {
		out.ParentSpanId = s.Parent[:]
	}
	if s.Failed != "" {
		out.Status = &otlptrace.Status{Code: otlptrace.Status_STATUS_CODE_ERROR, Message: s.Failed}
	}
	for _, m := range s.Moments {
		out.Events = append(out.Events, &otlptrace.Span_Event{Name: m.Name, TimeUnixNano: nano(m.At)})
	}
	return out
}

func nano(t time.Time) uint64 { return uint64(max(0, t.UnixNano())) } //nolint:gosec // not negative

func attributesOf(list []traces.Attribute) []*common.KeyValue {
	out := make([]*common.KeyValue, 0, len(list))
	for _, a := range list {
		var v *common.AnyValue
		switch is := a.Value.(type) {
		case string:
			v = &common.AnyValue{Value: &common.AnyValue_StringValue{StringValue: traces.Text(is)}}
		case int64:
			v = &common.AnyValue{Value: &common.AnyValue_IntValue{IntValue: is}}
		case float64:
			v = &common.AnyValue{Value: &common.AnyValue_DoubleValue{DoubleValue: is}}
		}
		out = append(out, &common.KeyValue{Key: strings.ToValidUTF8(a.Key, ""), Value: v})
	}
	return out
}

// rejected returns how many spans of a request the collector did not take, and why, from its answer.
func rejected(answer []byte) (spans int64, why string) {
	var r collector.ExportTraceServiceResponse
	if proto.Unmarshal(answer, &r) != nil { // the status is enough
		return 0, ""
	}
	return r.GetPartialSuccess().GetRejectedSpans(), r.GetPartialSuccess().GetErrorMessage()
}
