{{- /* The operator's rights; docs/operator.md has the same as a table, and a test holds them equal. */ -}}

{{- /* In every namespace that is served. */ -}}
{{- define "trimtab.rules.served" -}}
- apiGroups: [serving.trimtab.dev]
  resources: [inferenceservices, tuningruns]
  verbs: [get, list, watch]
- apiGroups: [serving.trimtab.dev]
  resources: [inferenceservices/status, tuningruns/status]
  verbs: [patch]
- apiGroups: [serving.trimtab.dev]
  resources: [inferenceservices/finalizers, tuningruns/finalizers]
  verbs: [update]
# A drift's run; and finished ones of drift and schedule.
- apiGroups: [serving.trimtab.dev]
  resources: [tuningruns]
  verbs: [create, delete]
- apiGroups: [batch]
  resources: [cronjobs]
  verbs: [get, list, watch, create, patch, delete]
# Of accounts that may do less than the operator itself.
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
# What is always wanted is deleted by the garbage collector alone. Deployments and Services also stand for the length of a Shadow run.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [services, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
# A tuning run's worker: made once, ended with its run, collected with it.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, create, delete]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
# The worker's, which only who has it may grant.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors, prometheusrules]
  verbs: [get, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [list, create, patch]
{{- end -}}

{{- /* In the operator's own namespace. */ -}}
{{- define "trimtab.rules.home" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get, create, update]
- apiGroups: [""]
  resources: [configmaps]
  resourceNames: [{{ include "trimtab.fleet" . }}]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- if .Values.adminKey.create }}
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
{{- end }}
{{- end -}}
