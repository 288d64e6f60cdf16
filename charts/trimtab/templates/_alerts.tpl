{{- /* Alerts on the operator itself. docs/helm.md says for each what to do. `$here` keeps to this release's pods. */ -}}
{{- define "trimtab.alerts" -}}
{{- $here := printf "namespace=%q,pod=~%q" .Release.Namespace (printf "%s-.*" (include "trimtab.operator" .)) -}}
- alert: TrimtabOperatorNotActing
  expr: (sum(trimtab_operator_leading{ {{- $here -}} }) or vector(0)) < 1
  for: 5m
  labels: {severity: critical}
  annotations:
    summary: No Trimtab operator acts
    description: For five minutes no operator has held the Lease. Engines serve on; edits, failures and candidates get no answer.
- alert: TrimtabOperatorLooksAway
  expr: time() - max(trimtab_operator_last_resync_timestamp_seconds{ {{- $here -}} }) > {{ add (mul 3 (int64 .Values.operator.resyncSeconds)) 60 }}
  for: 5m
  labels: {severity: warning}
  annotations:
    summary: The operator has not listed its services for three periods
    description: The operator cannot list InferenceServices, or its resync is stuck. Changes may go unseen.
- alert: TrimtabOperatorReconcilesFail
  expr: sum(rate(trimtab_operator_reconcile_total{result!="ok",{{ $here }}}[15m])) / sum(rate(trimtab_operator_reconcile_total{ {{- $here -}} }[15m])) > 0.2
  for: 15m
  labels: {severity: warning}
  annotations:
    summary: A fifth of the operator's looks fail
    description: More than 20 % of reconciles ended in an error over 15 minutes; the operator's log names services and causes.
- alert: TrimtabOperatorDenied
  expr: sum by (verb, kind) (increase(trimtab_operator_api_requests_total{code="403",{{ $here }}}[15m])) > 0
  for: 15m
  labels: {severity: warning}
  annotations:
    summary: The API server denies the operator a right
    description: {{ "{{ $labels.verb }} of {{ $labels.kind }} is answered 403. The operator's roles are not those of its version, or a policy forbids it." | quote }}
- alert: TrimtabServicesStalled
  expr: sum by (reason) (max by (reason) (trimtab_operator_services{reason=~"ProgressDeadlineExceeded|ModelLoadFailed|InsufficientGPU|ImagePullFailed|EngineCrashed|PodsNotCreated|NameTaken|ApiDenied|InvalidSpec",{{ $here }}})) > 0
  for: 15m
  labels: {severity: warning}
  annotations:
    summary: InferenceServices wait for a person
    description: {{ "{{ $value }} services are not Ready for reason {{ $labels.reason }}. kubectl get infsvc -A says which." | quote }}
- alert: TrimtabLiveConfigRefused
  expr: sum(increase(trimtab_operator_live_pushes_total{result="refused",{{ $here }}}[15m])) > 0
  for: 15m
  labels: {severity: warning}
  annotations:
    summary: Engines refuse their live configuration
    description: An engine answered a live document with a refusal. Condition ConfigApplied of the service names the pod and the cause.
{{- end -}}
